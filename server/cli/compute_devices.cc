#include "server/cli/compute_devices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/log.h"
#include "engine/device_choice.h"

namespace dovetail::cli {

void AddComputeDevicesFlag(CLI::App& command, EngineFlags& flags) {
  command
      .add_option("--compute-devices", flags.compute_devices,
                  "GPUs of the compute workers, taken in turn, as cuda:0,cuda:1: one compute worker for each, unless "
                  "--compute-workers asks for more; they divide requests and long prompts")
      ->type_name("LIST")
      ->group("Device");
}

std::vector<std::string> ComputeDevicesOf(const EngineFlags& flags) {
  if (flags.compute_devices.empty()) return {};
  return absl::StrSplit(flags.compute_devices, ',');
}

absl::StatusOr<int> ComputeWorkersOf(const EngineFlags& flags) {
  if (flags.compute_devices.empty()) return flags.compute_workers;
  int devices = 0;
  for (const absl::string_view device : absl::StrSplit(flags.compute_devices, ',')) {
    ++devices;
    if (!kernels::cuda::ParseCudaName(std::string(device)).ok())
      return InvalidArgument("--compute-devices: '", device,
                             "' is not cuda:N, as in cuda:0,cuda:1; `dovetail devices` "
                             "lists what is here");
  }
  if (flags.device != "auto")
    return InvalidArgument("--compute-devices ", flags.compute_devices,
                           ": it says where the layers run, and so does "
                           "--device ",
                           flags.device, "; leave that out");
  if (devices > engine::kMaxComputeWorkers)
    return InvalidArgument("--compute-devices: ", devices, " devices; ", engine::kMaxComputeWorkers, " are the most");
  if (flags.compute_workers != 1 && flags.compute_workers < devices)
    return InvalidArgument("--compute-devices: ", devices, " devices are more than the ", flags.compute_workers,
                           " of --compute-workers; leave --compute-workers out, or take fewer devices");
  return std::max(devices, flags.compute_workers);
}

namespace {

// So that they can copy from each other.
absl::Status ConnectComputeDevices(RunningEngine& engine) {
  std::vector<kernels::cuda::CudaDevice*> gpus;
  if (!engine.more_compute_devices.empty()) gpus.push_back(engine::AsGpu(*engine.device));
  for (const RunningEngine::ComputeDevice& more : engine.more_compute_devices) gpus.push_back(more.gpu.get());
  for (kernels::cuda::CudaDevice* const from : gpus)
    for (kernels::cuda::CudaDevice* const to : gpus) {
      DT_ASSIGN_OR_RETURN(const bool reaches, from->ReachPeer(*to));
      if (!reaches)
        LogWarning(from->name(), " does not reach the memory of ", to->name(),
                   ": what compute workers give each other goes through the host");
    }
  return absl::OkStatus();
}

}  // namespace

absl::Status OpenComputeDevices(const EngineFlags& flags, const std::vector<std::string>& gpus,
                                const model::Checkpoint& checkpoint, RunningEngine& engine) {
  for (size_t i = 1; i < gpus.size(); ++i) {
    EngineFlags of_one = flags;
    of_one.device = gpus[i];
    DT_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Device> device, CreateDevice(of_one, checkpoint));
    if (device->arithmetic() != engine.device->arithmetic())
      return InvalidArgument("--compute-devices: ", gpus[i], " is a ", device->arithmetic(), ", and ", gpus[0], " a ",
                             engine.device->arithmetic(),
                             "; they would compute unlike results, so take GPUs of a kind");
    engine.more_compute_devices.emplace_back().gpu.reset(engine::AsGpu(*device.release()));
  }
  return ConnectComputeDevices(engine);
}

absl::Status LoadOnComputeDevices(const EngineFlags& flags, const model::LoadProgress& progress,
                                  RunningEngine& engine) {
  for (RunningEngine::ComputeDevice& more : engine.more_compute_devices) {
    DT_ASSIGN_OR_RETURN(
        more.weights, compute::CudaModel::Load(*more.gpu, *engine.model, KvDtypeOf(flags), flags.load_format == "dummy",
                                               GpuWeightsOf(flags), progress));
    if (more.weights->keeps() != engine.on_gpu->keeps())
      return FailedPrecondition("--compute-devices: ", more.gpu->name(), " has room for weights in ",
                                more.weights->keeps() ? "4 and 8" : "16",
                                " bits, and the first GPU for others; "
                                "--gpu-weights keep or dequantise makes them alike");
  }
  return absl::OkStatus();
}

namespace {

bool CacheIsOnAComputeDevice(const RunningEngine& engine) {
  if (engine.attention_device == nullptr) return true;
  return std::any_of(engine.more_compute_devices.begin(), engine.more_compute_devices.end(),
                     [&](const auto& more) { return more.gpu->name() == engine.attention_device->name(); });
}

}  // namespace

void ChooseExchangeOfGpus(const proto::AttentionTable& table, const RunningEngine& engine, bool pairs,
                          EngineFlags& flags) {
  if (engine.more_compute_devices.empty()) return;
  if (!pairs && CacheIsOnAComputeDevice(engine))
    LogWarning(
        "--attention-device: the KV cache is on a GPU that also computes, so each layer of a prompt over several "
        "GPUs waits for that GPU's kernels (16,384 tokens took 3.4 times as long as on one GPU); "
        "--attention-device cpu, or a GPU of its own, serves long prompts faster");
  flags.prefill_exchange = ExchangeBetweenGpus(flags, table);
}

std::string ExchangeBetweenGpus(const EngineFlags& flags, const proto::AttentionTable& table) {
  if (flags.prefill_exchange != "auto" || table.has_linear()) return flags.prefill_exchange;
  const bool scratch =
      flags.prompt_scratch == "auto" || ParseBytes("--prompt-scratch", flags.prompt_scratch).value_or(1) > 0;
  return scratch ? "gather-direct" : flags.prefill_exchange;
}

}  // namespace dovetail::cli
