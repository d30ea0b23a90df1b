#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "base/crash_report.h"
#include "server/cli/bench_command.h"
#include "server/cli/bench_cost_command.h"
#include "server/cli/bench_device_command.h"
#include "server/cli/bench_serve_command.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/command_line.h"
#include "server/cli/commands.h"
#include "server/cli/plan_command.h"
#include "server/cli/plan_prefill_command.h"
#include "server/cli/terminal.h"
#include "server/version.h"

namespace dovetail::cli {
namespace {

constexpr const char* kModelHelp = "A .gguf file, or a Hugging Face folder (config.json and safetensors)";
constexpr const char* kTemplateHelp =
    "Chat template: a Jinja file, a built-in one (chatml, llama3, gemma, mistral, phi3, zephyr, llama2), or none, in "
    "place of the model's own";

int Fail(const std::string& text, int exit_code) {
  const std::string name = Coloured("dovetail:", "1;31", ShowsColours(STDERR_FILENO));
  std::fprintf(stderr, "%s %s\n", name.c_str(), text.c_str());
  return exit_code;
}

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  if (!LogsAsJson()) return Fail(std::string(status.message()), 1);
  LogError(std::string(status.message()));
  return 1;
}

CLI::App& AddCommand(CLI::App& app, const std::string& name, const std::string& text, const std::string& examples) {
  CLI::App* command = app.add_subcommand(name, text);
  command->footer("Examples:\n" + examples);
  return *command;
}

void AddServe(CLI::App& app, ServeFlags& flags, int& exit_code) {
  CLI::App& command =
      AddCommand(app, "serve", "Serve a model over the OpenAI HTTP API until SIGTERM or Ctrl-C, then drain",
                 "  dovetail serve smollm2-135m-instruct.gguf\n"
                 "  dovetail serve ./Qwen2.5-0.5B-Instruct --host 0.0.0.0 --api-key-file keys --max-model-len 8192\n"
                 "  dovetail serve model.gguf --attention-workers 3 --placement mixed\n");
  AddEngineFlags(command, flags.engine);
  AddWorkerDeviceFlags(command, flags.engine);
  AddApiFlags(command, flags.api);
  AddLogFlags(command, flags.log);
  AddTraceFlags(command, flags.traces);
  command.callback([&] { exit_code = Report(RunServe(flags)); });
}

void AddRun(CLI::App& app, RunFlags& flags, int& exit_code) {
  CLI::App& command =
      AddCommand(app, "run", "Answer one prompt in the terminal, or hold a conversation",
                 "  dovetail run smollm2-135m-instruct.gguf\n"
                 "  dovetail run smollm2-135m-instruct.gguf \"What is the capital of France?\"\n"
                 "  dovetail run stories.gguf \"Once upon a time\" --raw --max-tokens 100 --temperature 0.8\n");
  AddEngineFlags(command, flags.engine);
  AddWorkerDeviceFlags(command, flags.engine);
  command.add_option("PROMPT", flags.prompt,
                     "What to answer; without it a conversation, or what standard input has if that is no terminal");
  command
      .add_option("--temperature", flags.temperature,
                  "0 always takes the likeliest token; more is more varied. Else 0 for a prompt, and in a conversation "
                  "what the model recommends")
      ->check(Number(0, 100))
      ->default_str("")
      ->type_name("T")
      ->group("Answer");
  command.add_option("--max-tokens", flags.max_tokens, "Longest answer; less where the model's positions end")
      ->check(WholeNumber(1, int64_t{1} << 26))
      ->type_name("TOKENS")
      ->group("Answer");
  command.add_option("--chat-template", flags.chat_template, kTemplateHelp)->type_name("FILE|NAME")->group("Answer");
  command.add_flag("--raw", flags.raw, "Continue the prompt as it is, without a chat template")->group("Answer");
  command.callback([&] { exit_code = Report(RunPrompt(flags)); });
}

void AddInspect(CLI::App& app, std::string& model, int& exit_code) {
  CLI::App& command = AddCommand(app, "inspect", "Print what a model holds and what it would need, without loading it",
                                 "  dovetail inspect smollm2-135m-instruct.gguf\n");
  command.add_option("MODEL", model, kModelHelp)->required();
  command.callback([&] { exit_code = Report(RunInspect(model)); });
}

void AddDevices(CLI::App& app, int& exit_code) {
  CLI::App& command =
      AddCommand(app, "devices", "List the devices that can be used, and say why not the rest", "  dovetail devices\n");
  command.callback([&] { exit_code = Report(RunDevices()); });
}

void AddLogits(CLI::App& app, LogitsFlags& flags, int& exit_code) {
  CLI::App& command =
      AddCommand(app, "logits", "Write the logits of given token ids: how references are compared",
                 "  dovetail logits model.gguf --ids 1,403,407 --last 1 --greedy 20 --dtype float32 --out logits.npy\n"
                 "  dovetail logits model.gguf --ids 1,4,... --compute-workers 3 --prefill-rank-tokens 64\n");
  AddEngineFlags(command, flags.engine);
  AddWorkerDeviceFlags(command, flags.engine);
  command.add_option("--ids", flags.ids, "The prompt as token ids, 1,2,3")
      ->required()
      ->type_name("IDS")
      ->group("Logits");
  command.add_option("--last", flags.last, "Only the logits of the last K positions; 0: of all")
      ->check(WholeNumber(0, INT32_MAX))
      ->type_name("K")
      ->group("Logits");
  command.add_option("--greedy", flags.greedy, "Also generate N tokens greedily and print their ids")
      ->check(WholeNumber(0, INT32_MAX))
      ->type_name("N")
      ->group("Logits");
  command.add_option("--out", flags.out, "The .npy file to write: float32 [positions, vocabulary]")
      ->type_name("FILE")
      ->group("Logits");
  command.callback([&] { exit_code = Report(RunLogits(flags)); });
}

struct AllBenchFlags {
  BenchFlags engine;
  BenchServeFlags serve;
  BenchCostFlags cost;
  BenchDeviceFlags device;
};

void AddBench(CLI::App& app, AllBenchFlags& flags, int& exit_code) {
  CLI::App& command = AddCommand(app, "bench", "Measure a model in this process: one stream, prefill, batches",
                                 "  dovetail bench smollm2-135m-instruct.gguf --batch 1,16,64 --repeat 3\n"
                                 "  dovetail bench serve --help\n"
                                 "  dovetail bench cost --help\n"
                                 "  dovetail bench device --help\n");
  AddBenchFlags(command, flags.engine);
  CLI::App& serve = AddCommand(
      command, "serve", "Measure a server of the OpenAI API as its clients see it, as `vllm bench serve` does",
      "  dovetail bench serve --port 8000 --num-prompts 200 --request-rate 4 --goodput ttft:500 tpot:50\n"
      "  dovetail bench serve --dataset-name timed_trace --dataset-path trace.jsonl.gz \\\n"
      "    --timed-trace-sec-multiplier 0.001 --time-scale 2 --save-result --result-dir results\n");
  AddBenchServeFlags(serve, flags.serve);
  serve.callback([&] { exit_code = Report(RunBenchServe(flags.serve)); });
  CLI::App& cost = AddCommand(command, "cost", "What tokens cost in layouts that `bench serve` measured",
                              "  dovetail bench cost --prices prices/2026-11-25.json --utilization 0.65 \\\n"
                              "    --layout whole=whole.json@compute.h200:2,host.cpu-machine:1 \\\n"
                              "    --layout split=split.json@compute.h200:1,attention.h20:2,host.cpu-machine:1\n");
  AddBenchCostFlags(cost, flags.cost);
  cost.callback([&] { exit_code = Report(RunBenchCost(flags.cost)); });
  CLI::App& device = AddCommand(command, "device", "Measure this machine's CPU in a minute, and write its profile",
                                "  dovetail bench device --name epyc-zen4 --out epyc-zen4.json\n"
                                "  dovetail bench device --name one-core --threads 1 --out one-core.json\n");
  AddBenchDeviceFlags(device, flags.device);
  device.callback([&] { exit_code = Report(RunBenchDevice(flags.device)); });
  // MODEL is for the command without a further one.
  CLI::Option* const model = command.get_option("MODEL")->required(false);
  command.callback([&command, &flags, &exit_code, model] {
    if (!command.get_subcommands().empty()) return;
    if (model->count() == 0) throw CLI::RequiredError("MODEL");
    exit_code = Report(RunBench(flags.engine));
  });
}

void AddPlanPrefill(CLI::App& app, PlanPrefillFlags& flags, int& exit_code) {
  CLI::App& command = AddCommand(
      app, "plan-prefill", "Predict one long prompt over several compute workers: bytes, times and what bounds them",
      "  dovetail plan-prefill ./Llama-3-8B --tokens 1M --ranks 8 --link nvlink\n"
      "  dovetail plan-prefill model.gguf --tokens 32K --cached-tokens 96K --ranks 2,4 --link 12.5GB/s:10us\n"
      "  dovetail plan-prefill model.gguf --tokens 8K --ranks 2,4 --link 5GB/s:20us --measure --threads 2\n"
      "  dovetail plan-prefill model.gguf --tokens 32K --ranks 2 --rates rates.json --json\n");
  AddPlanPrefillFlags(command, flags);
  command.callback([&] { exit_code = Report(RunPlanPrefill(flags)); });
}

void AddPlan(CLI::App& app, PlanFlags& flags, int& exit_code) {
  CLI::App& command = AddCommand(
      app, "plan", "Predict which machines serve a load cheapest: whole or split, how many of which, and what binds",
      "  dovetail plan model.gguf --profile epyc.json --devices epyc:4 --price epyc=0.12 \\\n"
      "    --workload 512/128 --request-rate 2 --slo ttft:1000 tpot:100\n"
      "  dovetail plan ./Llama-3-8B --profile a.json --profile b.json --devices a:2,b:4 --prices "
      "prices/2026-11-25.json "
      "\\\n"
      "    --workload trace.csv.gz --slo ttft:2000 tpot:100 --budget 10 --link rdma-400g\n"
      "  dovetail plan model.gguf --profile core.json --price core=0.03 --workload 128/64 \\\n"
      "    --layout compute.core:1,attention.core:1 --json\n");
  AddPlanFlags(command, flags);
  command.callback([&] { exit_code = Report(RunPlan(flags)); });
}

int Main(int argc, char** argv) {
  CLI::App app(
      "dovetail: an LLM inference server with the dense layers and the attention of every layer on different "
      "workers",
      "dovetail");
  app.formatter(HelpFormatter());
  app.option_defaults()->always_capture_default();
  app.require_subcommand(1);
  app.footer("`dovetail COMMAND --help` explains the flags of a command.");
  app.set_version_flag("--version", std::string("dovetail ") + kVersion, "Print the version and exit");
  int exit_code = 0;
  ServeFlags serve;
  AddServe(app, serve, exit_code);
  RunFlags run;
  AddRun(app, run, exit_code);
  ClusterCommands cluster;
  cluster.AddTo(app, [&](const absl::Status& status) { exit_code = Report(status); });
  std::string inspected;
  AddInspect(app, inspected, exit_code);
  AddDevices(app, exit_code);
  AllBenchFlags bench;
  AddBench(app, bench, exit_code);
  PlanFlags plan;
  AddPlan(app, plan, exit_code);
  PlanPrefillFlags plan_prefill;
  AddPlanPrefill(app, plan_prefill, exit_code);
  LogitsFlags logits;
  AddLogits(app, logits, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return Fail(ExplainUsage(app, argc, argv, error), kUsageError);
  } catch (const std::bad_alloc&) {  // of a library, or the standard one: what it wanted is unknown
    return Fail("this machine has too little free memory for what was asked", 1);
  } catch (const std::exception& error) {
    return Fail(error.what(), 1);
  }
  return exit_code;
}

}  // namespace
}  // namespace dovetail::cli

int main(int argc, char** argv) {
  dovetail::ReportCrashes(argv[0]);
  return dovetail::cli::Main(argc, argv);
}
