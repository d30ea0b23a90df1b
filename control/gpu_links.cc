#include "control/gpu_links.h"

#include <utility>

#include "transport/ucx/device_link.h"

namespace dovetail::control {

absl::Status GpuLinksBuilt() { return transport::ucx::DeviceLinksBuilt(); }

absl::StatusOr<std::unique_ptr<transport::DeviceLinks>> MakeGpuLinks(
    std::function<absl::StatusOr<void*>(void* list, unsigned index)> resolve) {
  return transport::ucx::MakeDeviceLinks(std::move(resolve));
}

}  // namespace dovetail::control
