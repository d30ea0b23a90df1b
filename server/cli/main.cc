#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/cli/bench_command.h"
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

void AddServe(CLI::App& app, ServeFlags& flags, int& exit_code) {
  CLI::App* command = app.add_subcommand("serve", "Serve a model over the OpenAI HTTP API");
  AddEngineFlags(*command, flags.engine);
  command->add_option("--host", flags.host, "Address to listen on")->group("HTTP");
  command->add_option("--port", flags.port, "Port to listen on; 0: a free one")->group("HTTP");
  command->add_option("--api-key", flags.api_keys, "A key that clients must present; repeatable; none: everybody may")->group("HTTP");
  command->add_option("--metrics-api-key", flags.metrics_api_keys, "A key for /metrics alone; repeatable")->group("HTTP");
  command->add_option("--served-model-name", flags.served_model_name, "What the API calls the model")->group("HTTP");
  command->add_option("--chat-template", flags.chat_template, "A Jinja file used in place of the model's own template")->group("HTTP");
  command->add_option("--shutdown-timeout", flags.shutdown_timeout, "Seconds that running requests have after SIGTERM")
      ->check(CLI::Range(0, 86400))
      ->group("HTTP");
  command->callback([&] { exit_code = Report(RunServe(flags)); });
}

void AddRun(CLI::App& app, RunFlags& flags, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "Answer one prompt in the terminal");
  AddEngineFlags(*command, flags.engine);
  command->add_option("PROMPT", flags.prompt, "The prompt")->required();
  command->add_option("--temperature", flags.temperature, "0: greedy")->check(CLI::Range(0.0f, 100.0f));
  command->add_option("--max-tokens", flags.max_tokens, "Longest answer")->check(CLI::Range(1, 1 << 26));
  command->add_option("--chat-template", flags.chat_template, "A Jinja file used in place of the model's own template");
  command->add_flag("--raw", flags.raw, "Continue the prompt as it is, without a chat template");
  command->callback([&] { exit_code = Report(RunPrompt(flags)); });
}

void AddInspect(CLI::App& app, std::string& model, int& exit_code) {
  CLI::App* command = app.add_subcommand("inspect", "Print what a model holds and what it would need");
  command->add_option("MODEL", model, "A .gguf file, or a Hugging Face folder")->required();
  command->callback([&] { exit_code = Report(RunInspect(model)); });
}

void AddBench(CLI::App& app, BenchFlags& flags, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Measure a model in this process: one stream, prefill, batches");
  AddBenchFlags(*command, flags);
  command->callback([&] { exit_code = Report(RunBench(flags)); });
}

int Main(int argc, char** argv) {
  CLI::App app("dovetail: an LLM inference server with dense layers and attention on different machines", "dovetail");
  app.require_subcommand(1);
  int exit_code = 0;
  LogitsFlags logits;
  AddLogits(app, logits, exit_code);
  ServeFlags serve;
  AddServe(app, serve, exit_code);
  RunFlags run;
  AddRun(app, run, exit_code);
  std::string inspected;
  AddInspect(app, inspected, exit_code);
  BenchFlags bench;
  AddBench(app, bench, exit_code);
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
