#include "server/cli/terminal.h"

#include <editline/readline.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <clocale>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/thread_name.h"

namespace dovetail::cli {
namespace {

constexpr int kMostHistory = 1000;  // lines

int interrupt_fd = -1;  // of the one Interrupts; written by a signal handler, which has nothing else

void OnInterrupt(int) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interrupt_fd, &one, sizeof(one));
}

}  // namespace

bool ShowsColours(int descriptor) {
  const char* const none = std::getenv("NO_COLOR");
  const char* const terminal = std::getenv("TERM");
  if (none != nullptr && *none != '\0') return false;
  return isatty(descriptor) == 1 && terminal != nullptr && std::string(terminal) != "dumb";
}

std::string Coloured(const std::string& text, const char* colour, bool colours) {
  return colours ? absl::StrCat("\x1b[", colour, "m", text, "\x1b[0m") : text;
}

LineEditor::LineEditor() {
  std::setlocale(LC_CTYPE, "C.UTF-8");  // characters of several bytes are edited as one
  rl_initialize();
  using_history();
  stifle_history(kMostHistory);
}

std::optional<std::string> LineEditor::Read(const std::string& prompt, bool& interrupted) {
  const std::unique_ptr<char, decltype(&std::free)> line(readline(prompt.c_str()), std::free);
  if (line != nullptr) return std::string(line.get());
  if (interrupted) std::clearerr(stdin);
  return std::nullopt;
}

void LineEditor::Remember(const std::string& line) { add_history(line.c_str()); }

Interrupts::Interrupts() {
  interrupt_fd = eventfd(0, EFD_CLOEXEC);
  DT_CHECK(interrupt_fd >= 0);
  watcher_ = std::thread([this] {
    NameThread("dt-interrupts");
    for (uint64_t count = 0; read(interrupt_fd, &count, sizeof(count)) == sizeof(count);) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (count >= uint64_t{1} << 32) return;  // the destructor's
      raised_ = true;
      if (action_) action_();
    }
  });
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);  // without SA_RESTART: a line that is being read ends
}

Interrupts::~Interrupts() {
  std::signal(SIGINT, SIG_DFL);
  const uint64_t end = uint64_t{1} << 32;
  [[maybe_unused]] const ssize_t written = write(interrupt_fd, &end, sizeof(end));
  watcher_.join();
  close(std::exchange(interrupt_fd, -1));
}

void Interrupts::SetAction(std::function<void()> action) {
  std::lock_guard<std::mutex> lock(mutex_);
  action_ = std::move(action);
}

}  // namespace dovetail::cli
