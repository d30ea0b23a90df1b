#include "server/cli/itl_budget_flag.h"

#include <cstdlib>

#include "server/cli/command_line.h"

namespace dovetail::cli {
namespace {

constexpr double kMostItlBudgetMs = 600'000;

}  // namespace

void AddItlBudgetFlag(CLI::App& command, const std::string& group, std::string& flag) {
  command
      .add_option(
          "--prefill-itl-budget", flag,
          "Milliseconds from a token of a running stream to its next one while prompts are read, kept by taking "
          "less of a prompt in a step; 0: no limit; auto: 1.4 times as long as without prompts, unless prompts "
          "then took more than 8 times as long as alone")
      ->check(CLI::Validator([number = Number(0, kMostItlBudgetMs, "or auto; 0 is no limit")](
                                 const std::string& text) { return text == "auto" ? std::string() : number(text); },
                             ""))
      ->type_name("auto|MS")
      ->group(group);
}

scheduler::ItlBudget ItlBudgetOf(const std::string& flag) {
  if (flag == "auto") return {.automatic = true};
  return {.seconds = std::atof(flag.c_str()) / 1e3};
}

}  // namespace dovetail::cli
