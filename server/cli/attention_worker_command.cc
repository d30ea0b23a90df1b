#include <utility>

#include "attention_worker/attention_worker_main.h"
#include "engine/device_choice.h"
#include "engine/exchange_choice.h"
#include "engine/host_limits.h"
#include "engine/numa_binding.h"
#include "server/cli/capabilities.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

absl::Status CheckFlags(const AttentionWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  DT_RETURN_IF_ERROR(engine::CheckWorkerDeviceName("--device", flags.device));
  return CheckKvCapacity(flags.kv);
}

}  // namespace

absl::Status RunAttentionWorker(const AttentionWorkerFlags& flags) {
  if (flags.check_flags) return CheckFlags(flags);
  if (flags.numa_node)  // before there is another thread
    DT_RETURN_IF_ERROR(engine::BindToNumaNode("--numa-node", *flags.numa_node, engine::ReadHostFacts()));
  const std::string process = flags.name.empty() ? "attention" : flags.name;
  BeginRole(process);
  const LogWriter log(LogOptionsOf(flags.log, process));
  StopSignal stop;
  attention::AttentionWorkerMainOptions role;
  role.snapshot_percent = flags.state_snapshots;
  role.storage = KvStorageOf(flags.kv_cache_dtype);
  role.digests = DigestsOf(flags.kv_checksums);
  role.trace_file = flags.trace_file;
  DT_ASSIGN_OR_RETURN(const auto device,
                      engine::OpenDevice("--device", flags.device, flags.threads,
                                         flags.data.spin_us > 0 ? flags.data.spin_us : engine::kSpinUs));
  DT_ASSIGN_OR_RETURN(const engine::ExchangeChoice exchange,
                      engine::ChooseExchange(flags.exchange, "the attention worker", *device));
  role.exchange = exchange.means;
  DT_ASSIGN_OR_RETURN(role.kv_bytes, KvBytesOf(flags.kv, *device, flags.numa_node));
  control::WorkerMainOptions options;
  options.scheduler = flags.control.scheduler;
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", options.scheduler, /*may_be_free=*/false));
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  DT_ASSIGN_OR_RETURN(auto connectors,
                      control::ConnectorsOf(flags.data, options.security, {.address = options.scheduler}));
  options.role = control::Role::kAttentionWorker;
  options.name = flags.name.empty() ? DefaultName("attention") : flags.name;
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail-attention-worker", options.name));
  role.spans = spans.get();
  DT_ASSIGN_OR_RETURN(options.capabilities, MeasureCapabilities(*device, flags.threads));
  options.capabilities.kv_bytes = role.kv_bytes;
  options.join_timeout = absl::Seconds(flags.join_timeout);
  bool warned = false;  // once it has joined, so that refusals are one line
  control::WorkerMain worker(options, std::move(connectors),
                             [&](transport::Connector& connector, const control::JoinReply& membership) {
                               if (!std::exchange(warned, true))
                                 engine::WarnOfWhatIsShort({.threads = flags.threads,
                                                            .on_cpu = engine::AsGpu(*device) == nullptr,
                                                            .rdma = flags.data.lanes == "rc"});
                               return attention::MakeAttentionWorker(role, *device, connector, membership);
                             });
  if (!flags.trace_file.empty()) stop.OwnerEnds();  // the trace is written at the end
  return stop.RunUntil([&] { return worker.Run(); }, [&] { worker.Stop(); });
}

}  // namespace dovetail::cli
