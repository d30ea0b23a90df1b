#include "server/cli/repl.h"

#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "server/cli/terminal.h"

namespace dovetail::cli {
namespace {

constexpr const char* kHelp =
    "  /system TEXT   what the model is told before the conversation; without TEXT nothing. Begins anew\n"
    "  /clear         begin anew\n"
    "  /exit          end, as Ctrl-D does\n"
    "A line that ends in \\ goes on in the next one; \"\"\" begins and ends a message of several lines.\n"
    "Ctrl-C stops an answer.\n";
constexpr const char* kQuotes = "\"\"\"";

class Repl {
 public:
  explicit Repl(Conversation& conversation) : conversation_(conversation) {}

  void Run() {
    std::printf("%s\n", Coloured("/help lists the commands; Ctrl-D ends.", "2", colours_).c_str());
    while (const std::optional<std::string> message = ReadMessage()) {
      if (message->empty()) continue;
      editor_.Remember(*message);
      if ((*message)[0] != '/')
        Ask(*message);
      else if (!Obey(*message))
        break;
    }
    std::printf("\n");
  }

 private:
  // Nothing: the end. Empty: nothing was said.
  std::optional<std::string> ReadMessage() {
    std::string message;
    bool quoted = false;
    while (true) {
      interrupts_.TakeRaised();
      const std::optional<std::string> read = editor_.Read(message.empty() && !quoted ? ">>> " : "... ");
      if (interrupts_.TakeRaised()) {
        std::printf("\n");
        return "";
      }
      if (!read) return message.empty() ? std::nullopt : std::optional<std::string>(message);
      std::string line = *read;
      if (message.empty() && !quoted && absl::StartsWith(line, kQuotes)) {
        quoted = true;
        line = line.substr(3);
      }
      if (quoted && absl::EndsWith(line, kQuotes)) return message + line.substr(0, line.size() - 3);
      if (!quoted && !absl::EndsWith(line, "\\")) return message + line;
      if (!quoted) line.pop_back();
      message += line + "\n";
    }
  }

  void Ask(const std::string& message) {
    interrupts_.SetAction([this] { conversation_.Cancel(); });
    const auto answer = conversation_.Ask(message, [](const std::string& text) {
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    });
    interrupts_.SetAction({});
    if (!answer.ok()) return Complain(std::string(answer.status().message()));
    std::printf("\n%s\n", Coloured(Describe(*answer), "2", colours_).c_str());
  }

  // False: the end is asked for.
  bool Obey(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string command = line.substr(0, space);
    const std::string rest(absl::StripAsciiWhitespace(space == std::string::npos ? "" : line.substr(space)));
    if (command == "/exit" || command == "/quit" || command == "/bye") return false;
    if (command == "/clear")
      conversation_.Clear();
    else if (command == "/system")
      conversation_.SetSystem(rest);
    else if (command == "/help")
      std::fputs(kHelp, stdout);
    else
      Complain("there is no command " + command + "; /help lists them, and a space before a / makes it a message");
    return true;
  }

  void Complain(const std::string& what) { std::printf("%s\n", Coloured(what, "31", colours_).c_str()); }

  Conversation& conversation_;
  const bool colours_ = ShowsColours(STDOUT_FILENO);
  Interrupts interrupts_;
  LineEditor editor_{interrupts_};
};

}  // namespace

absl::Status RunRepl(Conversation& conversation) {
  Repl(conversation).Run();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
