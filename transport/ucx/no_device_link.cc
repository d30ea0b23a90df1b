#include "transport/ucx/device_link.h"

// A build whose UCX has no device API.

namespace dovetail::transport::ucx {

absl::Status DeviceLinksBuilt() {
  return FailedPrecondition(
      "this build's UCX has no CUDA, so GPUs of two processes exchange layers through their hosts; build with "
      "-DDOVETAIL_UCX_ROOT=FOLDER, which scripts/fetch_ucx_cuda FOLDER fills, and with nvcc");
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): device_link.cc keeps it
absl::StatusOr<std::unique_ptr<DeviceLinks>> MakeDeviceLinks(ResolvePeer, absl::Duration) { return DeviceLinksBuilt(); }

}  // namespace dovetail::transport::ucx
