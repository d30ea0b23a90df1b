#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "attention_worker/attention_worker_main.h"
#include "engine/device_choice.h"
#include "engine/exchange_choice.h"
#include "engine/host_limits.h"
#include "engine/numa_binding.h"
#include "server/cli/capabilities.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/kv_taken.h"
#include "server/cli/role.h"
#include "server/cli/spare_input.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

constexpr const char* kSpare = "spare";  // what it is called until it has a name

absl::Status CheckFlags(const AttentionWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  DT_RETURN_IF_ERROR(engine::CheckWorkerDeviceName("--device", flags.device));
  return CheckKvCapacity(flags.kv);
}

// What a worker has before it has a name and KV: a spare waits with this.
struct Prepared {
  std::unique_ptr<kernels::Device> device;
  exchange::GpuExchangeMeans exchange;
  control::WorkerMainOptions options;
  control::WorkerMain::ConnectorFactory connectors;
};

absl::StatusOr<Prepared> Prepare(const AttentionWorkerFlags& flags) {
  Prepared worker;
  DT_ASSIGN_OR_RETURN(worker.device, engine::OpenDevice("--device", flags.device, flags.threads,
                                                        flags.data.spin_us > 0 ? flags.data.spin_us : engine::kSpinUs));
  DT_ASSIGN_OR_RETURN(worker.exchange, engine::ChooseExchange(flags.exchange, "the attention worker", *worker.device));
  control::WorkerMainOptions& options = worker.options;
  options.role = control::Role::kAttentionWorker;
  options.scheduler = flags.control.scheduler;
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", options.scheduler, /*may_be_free=*/false));
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  DT_ASSIGN_OR_RETURN(worker.connectors,
                      control::ConnectorsOf(flags.data, options.security, {.address = options.scheduler}));
  options.join_timeout = absl::Seconds(flags.join_timeout);
  // On a GPU that takes memory, of which a spare keeps none.
  if (engine::AsGpu(*worker.device) == nullptr) {
    DT_ASSIGN_OR_RETURN(options.capabilities, MeasureCapabilities(*worker.device, flags.threads));
  }
  return worker;
}

absl::Status ServeAttention(const AttentionWorkerFlags& flags, Prepared worker, StopSignal& stop) {
  kernels::Device& device = *worker.device;
  control::WorkerMainOptions& options = worker.options;
  attention::AttentionWorkerMainOptions role;
  role.snapshot_percent = flags.state_snapshots;
  role.storage = KvStorageOf(flags.kv_cache_dtype);
  role.digests = DigestsOf(flags.kv_checksums);
  role.trace_file = flags.trace_file;
  role.exchange = worker.exchange;
  DT_ASSIGN_OR_RETURN(role.kv_bytes, KvBytesOf(flags.kv, device, flags.numa_node));
  if (flags.kv.capacity == "auto") LogInfo(KvTakenLine(role.kv_bytes));
  options.name = flags.name.empty() ? DefaultName("attention") : flags.name;
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail-attention-worker", options.name));
  role.spans = spans.get();
  if (engine::AsGpu(device) != nullptr) {
    DT_ASSIGN_OR_RETURN(options.capabilities, MeasureCapabilities(device, flags.threads));
  }
  options.capabilities.kv_bytes = role.kv_bytes;
  bool warned = false;  // once it has joined, so that refusals are one line
  control::WorkerMain role_main(
      options, std::move(worker.connectors),
      [&](transport::Connector& connector, const control::JoinReply& membership) {
        if (!std::exchange(warned, true))
          engine::WarnOfWhatIsShort(
              {.threads = flags.threads, .on_cpu = engine::AsGpu(device) == nullptr, .rdma = flags.data.lanes == "rc"});
        return attention::MakeAttentionWorker(role, device, connector, membership);
      });
  if (!flags.trace_file.empty()) stop.OwnerEnds();  // the trace is written at the end
  return stop.RunUntil([&] { return role_main.Run(); }, [&] { role_main.Stop(); });
}

// As whatever started this spare says. Nothing: it is not needed.
absl::StatusOr<std::optional<AttentionWorkerFlags>> WaitForName(AttentionWorkerFlags flags, StopSignal& stop) {
  Announce(kSpareIsReady);
  SpareInput input;
  std::optional<SpareOrder> order;
  DT_RETURN_IF_ERROR(stop.RunUntil(
      [&]() -> absl::Status {
        DT_ASSIGN_OR_RETURN(order, input.Wait());
        return absl::OkStatus();
      },
      [&] { input.Stop(); }));
  if (!order) return std::nullopt;
  flags.name = order->name;
  if (order->kv_bytes) flags.kv = TakenBefore(flags.kv, *order->kv_bytes);
  if (!flags.trace_file.empty()) absl::StrAppend(&flags.trace_file, ".", order->name);
  return flags;
}

absl::Status RunSpare(const AttentionWorkerFlags& flags) {
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);  // before there is another thread: all kernels, now
  LogWriter log(LogOptionsOf(flags.log, kSpare));
  StopSignal stop;
  DT_RETURN_IF_ERROR(CheckFlags(flags));
  DT_ASSIGN_OR_RETURN(Prepared worker, Prepare(flags));
  DT_ASSIGN_OR_RETURN(const std::optional<AttentionWorkerFlags> named, WaitForName(flags, stop));
  if (!named) return absl::OkStatus();
  BeginRole(named->name);
  log.Rename(named->name);
  return ServeAttention(*named, std::move(worker), stop);
}

}  // namespace

absl::Status RunAttentionWorker(const AttentionWorkerFlags& flags) {
  if (flags.check_flags) return CheckFlags(flags);
  if (flags.numa_node)  // before there is another thread
    DT_RETURN_IF_ERROR(engine::BindToNumaNode("--numa-node", *flags.numa_node, engine::ReadHostFacts()));
  const std::string process = flags.spare ? kSpare : flags.name.empty() ? "attention" : flags.name;
  BeginRole(process);
  if (flags.spare) return RunSpare(flags);
  const LogWriter log(LogOptionsOf(flags.log, process));
  StopSignal stop;
  DT_ASSIGN_OR_RETURN(Prepared worker, Prepare(flags));
  return ServeAttention(flags, std::move(worker), stop);
}

}  // namespace dovetail::cli
