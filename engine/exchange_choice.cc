#include "engine/exchange_choice.h"

#include "base/log.h"
#include "control/gpu_links.h"
#include "engine/device_choice.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::engine {

absl::StatusOr<exchange::GpuExchangeMeans> ChooseExchange(const std::string& how, const std::string& role,
                                                          kernels::Device& device) {
  exchange::GpuExchangeMeans means;
  kernels::cuda::CudaDevice* const gpu = AsGpu(device);
  if (gpu == nullptr && how == "device")
    return FailedPrecondition("--exchange device: ", device.name(), " is no GPU; use auto or host");
  means.device = gpu;
  means.on_cpu = gpu == nullptr;
  means.required = how == "device";
  if (gpu == nullptr) means.why_not = absl::StrCat(role, " runs on ", device.name());
  if (gpu != nullptr && how == "host") means.why_not = absl::StrCat(role, " was started with --exchange host");
  if (!means.why_not.empty()) return means;
  DT_RETURN_IF_ERROR(gpu->library().Check(gpu->library()->use_device(gpu->index()), gpu->name()));
  auto links = control::MakeGpuLinks(
      [gpu](void* list, unsigned index) { return kernels::cuda::UcxPeerPointer(*gpu, list, index); });
  if (!links.ok()) {
    if (how == "device") return Annotate(links.status(), "--exchange device");
    means.why_not = absl::StrCat(role, ": ", links.status().message());
    LogInfo("layers are exchanged through the hosts: ", std::string(links.status().message()));
    return means;
  }
  means.links = *std::move(links);
  return means;
}

}  // namespace dovetail::engine
