#pragma once
#include <functional>
#include <memory>

#include "base/status.h"
#include "transport/device_link.h"

namespace dovetail::control {

// Links between GPUs of two processes, over the UCX of this build (transport/ucx/device_link.h). kFailedPrecondition
// says in one line why there are none.
// Threads: thread-safe.
absl::Status GpuLinksBuilt();
// Threads: thread-safe; what it returns is reactor-owned, as transport::DeviceLinks.
absl::StatusOr<std::unique_ptr<transport::DeviceLinks>> MakeGpuLinks(
    std::function<absl::StatusOr<void*>(void* list, unsigned index)> resolve);

}  // namespace dovetail::control
