#include <sys/sysinfo.h>

#include <algorithm>
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

// In addition to KV, a GPU holds a step's tables and whatever CUDA takes later.
constexpr uint64_t kPercentOfFree = 94;
constexpr uint64_t kLeastKvBytes = uint64_t{1} << 20;

// On the CPU a quarter of the machine's memory, or of what `numa_node` has.
absl::StatusOr<uint64_t> RoomOn(kernels::Device& device, std::optional<int> numa_node) {
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(device); gpu != nullptr) {
    DT_ASSIGN_OR_RETURN(const kernels::cuda::CudaDevice::Memory memory, gpu->memory());
    return memory.free_bytes / 100 * kPercentOfFree;
  }
  for (const engine::NumaNode& node : engine::ReadHostFacts().nodes)
    if (node.number == numa_node) return node.memory_bytes / 4;
  struct sysinfo machine;
  if (sysinfo(&machine) != 0) return Internal("--kv-capacity auto: this machine does not say how much memory it has");
  return uint64_t{machine.totalram} * machine.mem_unit / 4;
}

// --kv-capacity, or what auto comes to.
absl::StatusOr<uint64_t> KvBytesOf(const AttentionWorkerFlags& flags, kernels::Device& device) {
  if (flags.kv_capacity != "auto") {
    DT_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--kv-capacity", flags.kv_capacity, "auto"));
    if (bytes == 0) return InvalidArgument("--kv-capacity: a worker of no bytes holds no token; write 8GiB");
    return bytes;
  }
  DT_ASSIGN_OR_RETURN(const uint64_t room, RoomOn(device, flags.numa_node));
  DT_ASSIGN_OR_RETURN(const uint64_t leave, ParseBytes("--kv-leave", flags.kv_leave));
  DT_ASSIGN_OR_RETURN(const uint64_t most, ParseBytes("--kv-most", flags.kv_most));
  const uint64_t bytes = room > leave ? (room - leave) / static_cast<uint64_t>(flags.kv_sharers) : 0;
  if (bytes < kLeastKvBytes)
    return ResourceExhausted("--kv-capacity auto: ", room >> 20, " MiB are to be had on ", device.name(), ", of which ",
                             leave >> 20, " MiB are for others; free some memory there, or take another device");
  return most == 0 ? bytes : std::min(bytes, most);
}

absl::Status CheckFlags(const AttentionWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckPlanes(flags.control, flags.data));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  DT_RETURN_IF_ERROR(engine::CheckWorkerDeviceName("--device", flags.device));
  if (flags.kv_capacity != "auto") DT_RETURN_IF_ERROR(ParseBytes("--kv-capacity", flags.kv_capacity, "auto").status());
  DT_RETURN_IF_ERROR(ParseBytes("--kv-leave", flags.kv_leave).status());
  return ParseBytes("--kv-most", flags.kv_most).status();
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
  DT_ASSIGN_OR_RETURN(role.kv_bytes, KvBytesOf(flags, *device));
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
