#include <functional>

#include "engine/device_choice.h"
#include "engine/pair_nodes.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/compute_role.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

absl::Status CheckFlags(const PairWorkerFlags& flags) {
  DT_RETURN_IF_ERROR(CheckComputeWorkerFlags(flags.compute));
  return CheckKvCapacity(flags.kv);
}

absl::StatusOr<uint64_t> KvBytesBesideLayers(KvCapacityFlags kv, kernels::Device& device) {
  if (engine::AsGpu(device) != nullptr) {
    DT_ASSIGN_OR_RETURN(const uint64_t leave, ParseBytes("--kv-leave", kv.leave));
    kv.leave = std::to_string(leave + kBesideWeights);
  }
  return KvBytesOf(kv, device);
}

// The layers' buffers depend on the scheduler's limits, and take tens of GB where sequences are long. What is returned
// is asked once they are made. `kv_bytes` is a pair's share of a GPU that it shares with others; this is all that is
// left.
std::function<absl::StatusOr<uint64_t>()> KvRoomBesideBuffers(const KvCapacityFlags& flags, kernels::Device& device) {
  if (flags.capacity != "auto" || engine::AsGpu(device) == nullptr) return nullptr;
  KvCapacityFlags kv = flags;
  kv.sharers = 1;
  return [kv, &device] { return KvBytesBesideLayers(kv, device); };
}

}  // namespace

absl::Status RunPairWorker(const PairWorkerFlags& flags) {
  if (flags.compute.check_flags) return CheckFlags(flags);
  const std::string process = flags.compute.name.empty() ? "pair" : flags.compute.name;
  BeginRole(process);
  const LogWriter log(LogOptionsOf(flags.compute.log, process));
  StopSignal stop;
  DT_ASSIGN_OR_RETURN(const auto role,
                      PrepareComputeRole(flags.compute, "dovetail-pair-worker",
                                         flags.compute.name.empty() ? DefaultName("pair") : flags.compute.name));
  attention::AttentionWorkerMainOptions attention;
  attention.snapshot_percent = flags.state_snapshots;
  attention.storage = KvStorageOf(flags.compute.engine.kv_cache_dtype);
  attention.digests = DigestsOf(flags.kv_checksums);
  attention.exchange = role->tuning.exchange;
  attention.spans = role->spans.get();
  DT_ASSIGN_OR_RETURN(attention.kv_bytes, KvBytesBesideLayers(flags.kv, *role->device));
  attention.kv_room = KvRoomBesideBuffers(flags.kv, *role->device);
  role->options.attention.emplace();
  role->options.attention->name = role->options.name + "-attention";
  role->options.attention->capabilities = role->options.capabilities;
  role->options.attention->capabilities.kv_bytes = attention.kv_bytes;
  engine::PairNodes pair(*role->loaded.model, role->options.model->digest, *role->device, role->tuning,
                         flags.compute.engine.trace_file, attention);
  using Joined = control::WorkerMain::Joined;
  control::WorkerMain worker(role->options, role->connectors, [&](const Joined& computes, const Joined& attends) {
    role->WarnOfWhatIsShort(flags.compute);
    return pair.Make(computes, attends);
  });
  if (!flags.compute.engine.trace_file.empty()) stop.OwnerEnds();  // the trace is written at the end
  return stop.RunUntil([&] { return worker.Run(); }, [&] { worker.Stop(); });
}

}  // namespace dovetail::cli
