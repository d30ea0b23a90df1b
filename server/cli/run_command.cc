#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "server/cli/commands.h"
#include "server/cli/conversation.h"
#include "server/cli/model_text.h"
#include "server/cli/repl.h"
#include "server/cli/role.h"
#include "server/cli/terminal.h"

namespace dovetail::cli {
namespace {

absl::Status AnswerOnce(Conversation& conversation, const std::string& prompt) {
  DT_ASSIGN_OR_RETURN(const Answer answer, conversation.Ask(prompt, [](const std::string& text) {
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }));
  std::printf("\n");
  std::fflush(stdout);
  if (isatty(STDERR_FILENO))
    std::fprintf(stderr, "%s\n", Coloured(Describe(answer), "2", ShowsColours(STDERR_FILENO)).c_str());
  return absl::OkStatus();
}

// Of a pipe or a file.
absl::StatusOr<std::string> PromptFromInput() {
  const std::string all((std::istreambuf_iterator<char>(std::cin)), {});
  const std::string prompt(absl::StripTrailingAsciiWhitespace(all));
  if (prompt.empty())
    return InvalidArgument(
        "run: there is no prompt, and nothing on standard input; in a terminal it would be a "
        "conversation");
  return prompt;
}

}  // namespace

absl::Status RunPrompt(const RunFlags& flags) {
  BeginRole("run");
  const bool converses = flags.prompt.empty() && isatty(STDIN_FILENO);
  std::string prompt = flags.prompt;
  if (prompt.empty() && !converses) {
    DT_ASSIGN_OR_RETURN(prompt, PromptFromInput());
  }
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_ASSIGN_OR_RETURN(const auto served,
                      MakeServedModel(*engine.model->checkpoint,
                                      {.chat_template = flags.chat_template, .max_model_len = engine.max_model_len}));
  if (served->tokenizer == nullptr)
    return InvalidArgument(engine.model->checkpoint->name(), ": holds no tokenizer; `dovetail logits` takes token ids");
  AnswerOptions options;
  options.raw = flags.raw;
  options.temperature = flags.temperature;
  options.max_tokens = flags.max_tokens;
  options.seed = flags.engine.seed ? *flags.engine.seed : std::random_device()();
  options.max_model_len = engine.max_model_len;
  if (!converses && !options.temperature) options.temperature = 0;
  Conversation conversation(*engine.cluster, *served, options);
  return converses ? RunRepl(conversation) : AnswerOnce(conversation, prompt);
}

}  // namespace dovetail::cli
