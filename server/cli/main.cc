#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/cli/commands.h"

namespace dovetail::cli {
namespace {

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "dovetail: %s\n", std::string(status.message()).c_str());
  return 1;
}

void AddLogits(CLI::App& app, LogitsFlags& flags, int& exit_code) {
  CLI::App* command = app.add_subcommand("logits", "Write the logits of given token ids (how references are compared)");
  AddEngineFlags(*command, flags.engine);
  command->add_option("--ids", flags.ids, "Token ids, as 1,2,3")->required();
  command->add_option("--last", flags.last, "Only the last K positions; 0: all");
  command->add_option("--greedy", flags.greedy, "Also generate N tokens greedily and print their ids");
  command->add_option("--out", flags.out, "The .npy file to write");
  command->callback([&] { exit_code = Report(RunLogits(flags)); });
}

int Main(int argc, char** argv) {
  CLI::App app("dovetail: an LLM inference server with dense layers and attention on different machines", "dovetail");
  app.require_subcommand(1);
  int exit_code = 0;
  LogitsFlags logits;
  AddLogits(app, logits, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return exit_code;
}

}  // namespace
}  // namespace dovetail::cli

int main(int argc, char** argv) { return dovetail::cli::Main(argc, argv); }
