#pragma once
#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "base/status.h"
#include "transport/device_link.h"

namespace dovetail::transport::ucx {

// Whether this build has UCX's device API; else kFailedPrecondition says what it was built with and what would help.
absl::Status DeviceLinksBuilt();

// The address, as the GPU's kernels may use it, of element `index` of a remote memory list of UCX's device API.
using ResolvePeer = std::function<absl::StatusOr<void*>(void* list, unsigned index)>;

// Links over UCX's cuda_ipc lane: a ucp_context and a worker of their own, with UCX's device API. `patience`: how long
// a link may take from Accept on. kFailedPrecondition: as DeviceLinksBuilt, or this host has no such lane.
// Threads: reactor-owned. The main thread makes the links before the event loop runs, and destroys them after it. UCX
//   is told that several threads call it, one at a time (UCS_THREAD_MODE_SERIALIZED).
absl::StatusOr<std::unique_ptr<DeviceLinks>> MakeDeviceLinks(ResolvePeer resolve,
                                                             absl::Duration patience = absl::Seconds(10));

}  // namespace dovetail::transport::ucx
