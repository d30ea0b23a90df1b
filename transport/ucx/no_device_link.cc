#include "transport/ucx/device_link.h"

// A build whose UCX has no device API.

namespace dovetail::transport::ucx {

struct DeviceLinks::State {};
struct DeviceLink::State {
  std::string offer;
};

absl::Status DeviceLinksBuilt() {
  return FailedPrecondition(
      "this build's UCX has no CUDA, so GPUs of two processes exchange layers through their hosts; build with "
      "-DDOVETAIL_UCX_ROOT=FOLDER, which scripts/fetch_ucx_cuda FOLDER fills, and with nvcc");
}

absl::StatusOr<std::unique_ptr<DeviceLinks>> DeviceLinks::Create(Resolve) { return DeviceLinksBuilt(); }
DeviceLinks::DeviceLinks(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceLinks::~DeviceLinks() = default;

absl::StatusOr<std::unique_ptr<DeviceLink>> DeviceLink::Create(DeviceLinks&, void*, size_t, absl::Duration) {
  return DeviceLinksBuilt();
}
DeviceLink::DeviceLink(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceLink::~DeviceLink() = default;
const std::string& DeviceLink::offer() const { return state_->offer; }
absl::Status DeviceLink::Accept(std::string_view) { return DeviceLinksBuilt(); }
absl::StatusOr<bool> DeviceLink::Progress() { return DeviceLinksBuilt(); }
std::byte* DeviceLink::peer_memory() const { return nullptr; }
size_t DeviceLink::peer_bytes() const { return 0; }

}  // namespace dovetail::transport::ucx
