#include "server/cli/cluster_commands.h"

#include <algorithm>
#include <string>

#include "engine/embedded_cluster.h"
#include "engine/exchange_choice.h"
#include "scheduler/core/limits.h"
#include "server/cli/command_line.h"
#include "server/cli/compute_devices.h"
#include "server/cli/spares.h"

namespace dovetail::cli {
namespace {

CLI::App& AddCommand(CLI::App& app, const std::string& name, const std::string& text, const std::string& examples) {
  CLI::App* command = app.add_subcommand(name, text);
  command->footer("Examples:\n" + examples);
  return *command;
}

void AddNameFlag(CLI::App& command, std::string& name) {
  command.add_option("--name", name, "What operators see; unique in the cluster. Else the role, host and process")
      ->type_name("NAME")
      ->group("Control plane");
}

void AddJoinTimeoutFlag(CLI::App& command, int& seconds) {
  command
      .add_option("--join-timeout", seconds,
                  "How long a scheduler that cannot be reached is tried at first; one that was joined before is tried "
                  "without limit")
      ->check(WholeNumber(0, 86400))
      ->type_name("SECONDS")
      ->group("Control plane");
}

// One for each device that is named.
int WorkersFor(const std::string& devices) {
  return 1 + static_cast<int>(std::count(devices.begin(), devices.end(), ','));
}

void AddLeaseFlag(CLI::App& command, int& lease_ms) {
  command
      .add_option("--lease-ms", lease_ms, "A worker that is silent this long is taken out and its work done elsewhere")
      ->check(WholeNumber(50, 600'000))
      ->type_name("MS")
      ->group("Control plane");
}

void AddUnservedTimeoutFlag(CLI::App& command, int& seconds) {
  command
      .add_option(
          "--unserved-timeout", seconds,
          "How long requests wait while no compute worker or no attention worker serves; then they end with 503")
      ->check(WholeNumber(0, 86400))
      ->type_name("SECONDS")
      ->group("Control plane");
}

void AddStepTimeoutFlag(CLI::App& command, int& seconds) {
  command
      .add_option(
          "--step-timeout", seconds,
          "A compute worker that gives no result of a step is taken out after so long and what its tokens need: "
          "for each, ten times what the slowest so far took, 2 s at most. Then another does the step")
      ->check(WholeNumber(1, 86400))
      ->type_name("SECONDS")
      ->group("Control plane");
}

void AddUnlikeWorkersFlag(CLI::App& command, bool& unlike_workers) {
  command
      .add_flag(
          "--unlike-workers", unlike_workers,
          "Take compute workers that compute in another way than the first, as on a CPU together with a GPU: a request "
          "that goes from one to the other may get other tokens, and a long prompt is prefilled together only by "
          "workers "
          "that compute alike [off]")
      ->group("Control plane");
}

void AddKvCapacityFlag(CLI::App& command, KvCapacityFlags& flags) {
  command
      .add_option("--kv-capacity", flags.capacity,
                  "Memory for KV, as 8GiB; auto: what is free on a GPU, a quarter of the machine's for a CPU")
      ->type_name("SIZE")
      ->group("KV cache");
}

void AddKvShareFlags(CLI::App& command, KvCapacityFlags& flags) {
  command.add_option("--kv-leave", flags.leave, "With auto: what to leave of it, for weights still to come")
      ->type_name("SIZE")
      ->group("KV cache");
  command.add_option("--kv-sharers", flags.sharers, "With auto: attention workers that share it")
      ->check(WholeNumber(1, 64))
      ->type_name("N")
      ->group("KV cache");
  command.add_option("--kv-most", flags.most, "With auto: at most so much; 0: all")
      ->type_name("SIZE")
      ->group("KV cache");
}

void AddComputeWorkerFlags(CLI::App& command, ComputeWorkerFlags& flags) {
  command
      .add_option("MODEL", flags.engine.model, "A .gguf file, or a Hugging Face folder (config.json and safetensors)")
      ->required();
  AddSchedulerAddressFlag(command, flags.control);
  AddWeightFlags(command, flags.engine);
  AddNameFlag(command, flags.name);
  AddJoinTimeoutFlag(command, flags.join_timeout);
  AddSecurityFlags(command, flags.control);
  AddCheckFlagsFlag(command, flags.check_flags);
  AddLogFlags(command, flags.log);
  AddTraceFlags(command, flags.traces);
  AddDataFlags(command, flags.data);
  AddExchangeFlag(command, flags.exchange);
}

void AddLayoutFlags(CLI::App& command, UpFlags& flags) {
  command
      .add_option("--gpus", flags.gpus,
                  "GPUs that have layers and attention, as cuda:0,cuda:1, or all; --layout says how they share them")
      ->type_name("LIST")
      ->group("Device");
  command
      .add_option(
          "--layout", flags.layout,
          "pairs: each device has layers, and attention of its own sequences; split: layers on one, attention on "
          "others; auto: pairs where the GPUs are alike, else split [auto with --gpus, else split]")
      ->check(OneOf({"auto", "pairs", "split"}))
      ->default_str("")
      ->type_name("LAYOUT")
      ->group("Device");
}

absl::Status CheckLayoutFlags(const CLI::App& command, const UpFlags& flags) {
  for (const char* flag : {"--attention-workers", "--attention-devices", "--compute-devices", "--device"})
    if (command.count(flag) > 0 && !flags.gpus.empty())
      return InvalidArgument("--gpus: it says where layers and attention are, and so does ", flag,
                             "; leave one of them out");
  for (const char* flag : {"--attention-workers", "--attention-devices"})
    if (command.count(flag) > 0 && flags.layout == "pairs")
      return InvalidArgument("--layout pairs: each pair has one attention worker, on its own device; leave ", flag,
                             " out");
  return absl::OkStatus();
}

void AddSpareFlag(CLI::App& command, bool& spare) {
  command
      .add_flag("--spare", spare,
                "Open the device, and wait for a line `serve NAME` on standard input before taking KV and joining; end "
                "where that ends. A trace file gets .NAME behind its own [off]")
      ->excludes("--name")
      ->group("Control plane");
}

}  // namespace

void ClusterCommands::AddUp(CLI::App& app, const Report& report) {
  CLI::App& up = AddCommand(
      app, "up",
      "Start a cluster on this machine: scheduler, server, compute worker and attention workers as processes",
      "  dovetail up smollm2-135m-instruct.gguf --attention-workers 3\n");
  AddEngineFlags(up, up_.engine);
  AddApiFlags(up, up_.server.api);
  AddLogFlags(up, up_.log);
  AddTraceFlags(up, up_.traces);
  AddLeaseFlag(up, up_.lease_ms);
  AddUnservedTimeoutFlag(up, up_.unserved_timeout);
  AddStepTimeoutFlag(up, up_.step_timeout);
  AddUnlikeWorkersFlag(up, up_.unlike_workers);
  up.add_option("--listen", up_.listen, "Where the scheduler listens; port 0 takes a free one")
      ->type_name("HOST:PORT")
      ->group("Control plane");
  up.add_option("--lanes", up_.lanes, "What carries tensors: shm, tcp, or any")
      ->check(OneOf({"any", "shm", "tcp", "rc", "cuda_ipc"}))
      ->type_name("LANES")
      ->group("Data plane");
  AddTrustNetworkFlag(up, up_.trust_network);
  AddLayoutFlags(up, up_);
  AddComputeDevicesFlag(up, up_.engine);
  up.add_option("--attention-devices", up_.attention_devices,
                "Where attention runs, as cuda:1,cpu: the attention workers take these in turn; one each by default. "
                "With the size of the KV cache of each, as cuda:0=8GiB,cpu=64GiB; else as --kv-cache-memory-bytes says")
      ->type_name("DEVICES")
      ->group("Device");
  up.add_option("--spares", up_.spares,
                "Processes for each of these devices that wait without KV, so that one takes the place of an attention "
                "worker that ends, at once. On a GPU each takes some 500 MB of its memory")
      ->check(WholeNumber(0, Spares::kMost, "0 keeps none"))
      ->type_name("N")
      ->group("Device");
  up.add_option("--numa", up_.numa,
                "auto: where attention on the CPU has as many workers as the machine has NUMA nodes, each runs on one "
                "of these, with its K and V there; off: none is bound")
      ->check(OneOf({"auto", "off"}))
      ->type_name("MODE")
      ->group("Device");
  AddExchangeFlag(up, up_.exchange);
  up.callback([this, report, &up] {
    if (const absl::Status fits = CheckLayoutFlags(up, up_); !fits.ok()) return report(fits);
    if (up.count("--attention-workers") == 0) up_.engine.attention_workers = WorkersFor(up_.attention_devices);
    if (up_.engine.attention_workers > engine::kMaxAttentionWorkers)
      return report(InvalidArgument("--attention-devices: ", up_.engine.attention_workers, " devices; ",
                                    engine::kMaxAttentionWorkers, " attention workers are the most on one machine"));
    report(RunUp(up_));
  });
}

void ClusterCommands::AddScheduler(CLI::App& app, const Report& report) {
  CLI::App& scheduler =
      AddCommand(app, "scheduler", "Run the scheduler of a cluster; workers and servers connect to it",
                 "  dovetail scheduler --listen 10.0.0.5:7100 --join-token-file token --lanes tcp\n");
  scheduler
      .add_option("--listen", scheduler_.listen,
                  "Where workers and servers find it; port 0 takes a free one and prints it")
      ->type_name("HOST:PORT")
      ->group("Control plane");
  AddSecurityFlags(scheduler, scheduler_.control);
  AddLeaseFlag(scheduler, scheduler_.lease_ms);
  AddUnservedTimeoutFlag(scheduler, scheduler_.unserved_timeout);
  AddStepTimeoutFlag(scheduler, scheduler_.step_timeout);
  AddUnlikeWorkersFlag(scheduler, scheduler_.unlike_workers);
  AddCheckFlagsFlag(scheduler, scheduler_.check_flags);
  AddLogFlags(scheduler, scheduler_.log);
  AddTraceFlags(scheduler, scheduler_.traces);
  scheduler.add_option("--max-workers", scheduler_.max_workers, "Most workers of all roles")
      ->check(WholeNumber(1, 1000))
      ->type_name("N")
      ->group("Control plane");
  AddDataFlags(scheduler, scheduler_.data);
  AddSchedulerFlags(scheduler, scheduler_.engine);
  scheduler.callback([this, report] { report(RunScheduler(scheduler_)); });
}

void ClusterCommands::AddAttentionWorker(CLI::App& app, const Report& report) {
  CLI::App& attention =
      AddCommand(app, "attention-worker", "Run an attention worker: it holds KV cache, no weights, and knows no model",
                 "  dovetail attention-worker --scheduler 10.0.0.5:7100 --kv-capacity 8GiB\n");
  AddSchedulerAddressFlag(attention, attention_.control);
  AddKvCapacityFlag(attention, attention_.kv);
  attention
      .add_option(
          "--kv-cache-dtype", attention_.kv_cache_dtype,
          "K and V in its memory: auto: as the compute workers say; int8, int8_per_token_head, fp8, fp8_e4m3: 8 "
          "bits; int8 on a CPU")
      ->check(OneOf({"auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"}))
      ->type_name("TYPE")
      ->group("KV cache");
  AddKvShareFlags(attention, attention_.kv);
  AddStateSnapshotsFlag(attention, attention_.state_snapshots);
  AddKvChecksumsFlag(attention, attention_.kv_checksums);
  AddExchangeFlag(attention, attention_.exchange);
  AddNameFlag(attention, attention_.name);
  AddSpareFlag(attention, attention_.spare);
  AddJoinTimeoutFlag(attention, attention_.join_timeout);
  attention.add_option("--device", attention_.device, "Where KV lies and attention runs: cpu or cuda:N")
      ->type_name("DEVICE")
      ->group("Device");
  attention.add_option("--threads", attention_.threads, "Compute threads; 0: one per core")
      ->check(WholeNumber(0, 256, "0 takes one per core"))
      ->type_name("N")
      ->group("Device");
  attention
      .add_option("--numa-node", attention_.numa_node,
                  "Run on this node's cores, with K and V in its memory while it has some [not bound]")
      ->check(WholeNumber(0, 1023))
      ->type_name("N")
      ->group("Device");
  attention
      .add_option("--trace-file", attention_.trace_file,
                  "Write what it did when, as a Chrome trace, at the end (chrome://tracing shows it)")
      ->type_name("FILE")
      ->group("Device");
  AddSecurityFlags(attention, attention_.control);
  AddCheckFlagsFlag(attention, attention_.check_flags);
  AddLogFlags(attention, attention_.log);
  AddTraceFlags(attention, attention_.traces);
  AddDataFlags(attention, attention_.data);
  attention.callback([this, report] { report(RunAttentionWorker(attention_)); });
}

void ClusterCommands::AddComputeWorker(CLI::App& app, const Report& report) {
  CLI::App& compute =
      AddCommand(app, "compute-worker", "Run a compute worker: it holds the weights and runs the dense layers",
                 "  dovetail compute-worker smollm2-135m-instruct.gguf --scheduler 10.0.0.5:7100\n");
  AddComputeWorkerFlags(compute, compute_);
  compute.callback([this, report] { report(RunComputeWorker(compute_)); });
}

void ClusterCommands::AddPairWorker(CLI::App& app, const Report& report) {
  CLI::App& pair = AddCommand(
      app, "pair-worker",
      "Run a compute worker and an attention worker in one process and on one device: a pair, which keeps its "
      "sequences",
      "  dovetail pair-worker ./Llama-3-8B --device cuda:0 --scheduler 10.0.0.5:7100\n");
  AddComputeWorkerFlags(pair, pair_.compute);
  AddKvCapacityFlag(pair, pair_.kv);
  AddKvShareFlags(pair, pair_.kv);
  AddStateSnapshotsFlag(pair, pair_.state_snapshots);
  AddKvChecksumsFlag(pair, pair_.kv_checksums);
  pair.callback([this, report] { report(RunPairWorker(pair_)); });
}

void ClusterCommands::AddServer(CLI::App& app, const Report& report) {
  CLI::App& server =
      AddCommand(app, "server", "Serve the OpenAI HTTP API (and gRPC) of a cluster; needs no model files",
                 "  dovetail server --scheduler 10.0.0.5:7100 --host 0.0.0.0 --api-key-file keys\n");
  AddSchedulerAddressFlag(server, server_.control);
  AddApiFlags(server, server_.api);
  server
      .add_option("--seed", server_.seed,
                  "Seed of requests that bring none, so that they repeat themselves; without it they differ")
      ->check(WholeNumber(0, INT64_MAX))
      ->type_name("N")
      ->default_str("")
      ->group("API");
  server.add_option("--connect-timeout", server_.connect_timeout, "How long to wait for a scheduler and its model")
      ->check(WholeNumber(1, 86400))
      ->type_name("SECONDS")
      ->group("Control plane");
  AddSecurityFlags(server, server_.control);
  AddCheckFlagsFlag(server, server_.check_flags);
  AddLogFlags(server, server_.log);
  AddTraceFlags(server, server_.traces);
  server.callback([this, report] { report(RunServer(server_)); });
}

void ClusterCommands::AddStatus(CLI::App& app, const Report& report) {
  CLI::App& status = AddCommand(app, "status", "Print a cluster: its model, workers, lanes and load",
                                "  dovetail status --scheduler 10.0.0.5:7100\n");
  AddSchedulerAddressFlag(status, status_.control);
  AddSecurityFlags(status, status_.control);
  status.add_option("--ready", status_.ready, "Print nothing; fail unless this worker serves: a readiness probe")
      ->type_name("NAME")
      ->group("Probes");
  status
      .add_option("--alive", status_.alive,
                  "Print nothing; fail only if the scheduler answers and has no such worker: a liveness probe")
      ->type_name("NAME")
      ->excludes("--ready")
      ->group("Probes");
  status.callback([this, report] { report(RunStatus(status_)); });
}

void ClusterCommands::AddDrain(CLI::App& app, const Report& report) {
  CLI::App& drain =
      AddCommand(app, "drain", "Let a worker leave a cluster: what it holds moves to others, then it ends",
                 "  dovetail drain attention-2 --scheduler 10.0.0.5:7100\n");
  drain.add_option("WORKER", drain_.worker, "Its name or number, as `dovetail status` prints them")->required();
  AddSchedulerAddressFlag(drain, drain_.control);
  AddSecurityFlags(drain, drain_.control);
  drain.add_flag("--alone", drain_.alone, "Wait first until no other worker of its role drains [off]")
      ->group("Control plane");
  drain.callback([this, report] { report(RunDrain(drain_)); });
}

void ClusterCommands::AddTo(CLI::App& app, const Report& report) {
  AddUp(app, report);
  AddScheduler(app, report);
  AddAttentionWorker(app, report);
  AddComputeWorker(app, report);
  AddPairWorker(app, report);
  AddServer(app, report);
  AddStatus(app, report);
  AddDrain(app, report);
}

}  // namespace dovetail::cli
