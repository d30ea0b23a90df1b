#include "server/cli/attention_places.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "engine/device_choice.h"
#include "engine/measurements/memory_rate.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "server/cli/compute_devices.h"

namespace dovetail::cli {

absl::StatusOr<std::vector<AttentionPlace>> ParseAttentionPlaces(const std::string& flag, const std::string& value) {
  std::vector<AttentionPlace> places;
  for (const absl::string_view part : absl::StrSplit(value, ',')) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    AttentionPlace place{pair.first, std::nullopt};
    if (place.device != "cpu" && !kernels::cuda::ParseCudaName(place.device).ok())
      return InvalidArgument(flag, ": '", place.device,
                             "' is neither cpu nor cuda:N, as in cuda:1,cpu or cuda:0=8GiB,cpu=64GiB");
    if (part.size() > place.device.size()) {
      DT_ASSIGN_OR_RETURN(place.kv_bytes, ParseBytes(flag, pair.second));
    }
    places.push_back(std::move(place));
  }
  return places;
}

namespace {

// Each of several GPUs has its own compute worker and, unless flags say otherwise, its own attention worker.
bool MakesPairs(const EngineFlags& flags, int compute_workers) {
  const size_t gpus = ComputeDevicesOf(flags).size();
  return gpus > 1 && gpus == static_cast<size_t>(compute_workers) && flags.attention_device == "same" &&
         flags.attention_workers == 1;
}

}  // namespace

bool HasAttentionPlaces(const EngineFlags& flags, int compute_workers) {
  return flags.attention_device.find_first_of(",=") != std::string::npos || MakesPairs(flags, compute_workers);
}

namespace {

constexpr char kFlag[] = "--attention-device";

// By place in --compute-devices.
std::vector<kernels::Device*> DevicesOfLayers(const RunningEngine& engine) {
  std::vector<kernels::Device*> devices = {engine.device.get()};
  for (const RunningEngine::ComputeDevice& more : engine.more_compute_devices) devices.push_back(more.gpu.get());
  return devices;
}

kernels::Device* Named(const std::vector<kernels::Device*>& devices, const std::string& name) {
  const auto found = std::find_if(devices.begin(), devices.end(), [&](const auto* one) { return one->name() == name; });
  return found == devices.end() ? nullptr : *found;
}

absl::Status CheckPlaces(const EngineFlags& flags, int compute_workers, const std::vector<kernels::Device*>& computing,
                         const std::vector<AttentionPlace>& places) {
  const auto refuse = [&](const auto&... why) {
    return InvalidArgument(kFlag, " ", flags.attention_device, ": ", why...);
  };
  if (compute_workers > static_cast<int>(computing.size()))
    return refuse("a list is for one compute worker, or for one on each GPU, and there are ", compute_workers);
  if (flags.attention_workers != 1) return refuse("each place has one attention worker; leave --attention-workers out");
  if (flags.kv_cache_memory != "auto") return refuse("the list gives the sizes; leave --kv-cache-memory-bytes out");
  if (flags.placement == "heads" || flags.placement == "tokens" || flags.placement == "mixed")
    return refuse("--placement ", flags.placement, " would divide each sequence over the places; take tiers");
  for (const AttentionPlace& place : places) {
    const auto same = [&](const AttentionPlace& other) { return other.device == place.device; };
    if (std::count_if(places.begin(), places.end(), same) > 1) return refuse(place.device, " is there twice");
    if (place.device != "cpu" && Named(computing, place.device) == nullptr)
      return refuse(place.device, " is not where the layers run (",
                    absl::StrJoin(computing, ", ", [](std::string* out, const auto* d) { *out += d->name(); }),
                    "); one process has attention there and on cpu, `dovetail up --attention-devices` on other GPUs");
    if (place.device == "cpu" && !place.kv_bytes) return refuse("say how much of the host's memory, as cpu=64GiB");
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ReadRateOf(kernels::Device& device) {
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(device))
    return engine::MeasureGpuReadRate(*gpu, engine::kGpuReadRateBytes);
  const auto stream = device.CreateStream();
  if (stream == nullptr) return Internal(device.name(), ": no stream can be made");
  return engine::MeasureReadRate(stream->pool(), engine::kHostReadRateBytes);
}

// Each GPU of --compute-devices, with an equal part of --kv-cache-memory-bytes, or of what is free there.
absl::StatusOr<std::vector<engine::EmbeddedClusterOptions::AttentionPlace>> PairPlaces(const EngineFlags& flags,
                                                                                       RunningEngine& engine) {
  const std::vector<kernels::Device*> computing = DevicesOfLayers(engine);
  uint64_t bytes = 0;
  if (flags.kv_cache_memory != "auto") {
    DT_ASSIGN_OR_RETURN(bytes, ParseBytes("--kv-cache-memory-bytes", flags.kv_cache_memory, "auto"));
    bytes /= computing.size();
  }
  std::vector<engine::EmbeddedClusterOptions::AttentionPlace> places;
  for (kernels::Device* const device : computing) {
    const auto room = [bytes, gpu = engine::AsGpu(*device)] { return bytes > 0 ? bytes : KvRoomOf(*gpu); };
    places.push_back({.device = device, .kv_bytes = room, .sized_by = "--kv-cache-memory-bytes"});
  }
  return places;
}

}  // namespace

absl::StatusOr<std::vector<engine::EmbeddedClusterOptions::AttentionPlace>> OpenAttentionPlaces(
    const EngineFlags& flags, int compute_workers, RunningEngine& engine) {
  if (MakesPairs(flags, compute_workers)) return PairPlaces(flags, engine);
  DT_ASSIGN_OR_RETURN(const std::vector<AttentionPlace> places, ParseAttentionPlaces(kFlag, flags.attention_device));
  const std::vector<kernels::Device*> computing = DevicesOfLayers(engine);
  DT_RETURN_IF_ERROR(CheckPlaces(flags, compute_workers, computing, places));
  const bool on_host = std::any_of(places.begin(), places.end(), [](const auto& one) { return one.device == "cpu"; });
  std::vector<engine::EmbeddedClusterOptions::AttentionPlace> opened;
  for (const AttentionPlace& place : places) {
    engine::EmbeddedClusterOptions::AttentionPlace& one = opened.emplace_back();
    one.device = Named(computing, place.device);
    if (one.device == nullptr) {
      DT_ASSIGN_OR_RETURN(engine.attention_device,
                          engine::OpenDevice(kFlag, place.device, flags.threads, engine::kSpinBesideGpuUs));
      one.device = engine.attention_device.get();
    }
    kernels::cuda::CudaDevice* const gpu = engine::AsGpu(*one.device);
    one.kv_bytes = [bytes = place.kv_bytes, gpu] { return bytes ? *bytes : KvRoomOf(*gpu); };
    if (places.size() == 1 || !on_host) continue;
    DT_ASSIGN_OR_RETURN(one.read_rate, ReadRateOf(*one.device));
    LogInfo(kFlag, ": ", place.device, " is read at ", std::llround(one.read_rate / 1e9), " GB/s");
  }
  if (places.size() > 1 && on_host && flags.placement != "tiers")
    LogWarning(kFlag,
               ": sequences are divided between the places by what they have to read; --placement tiers keeps "
               "them on the faster one as long as that has room");
  return opened;
}

}  // namespace dovetail::cli
