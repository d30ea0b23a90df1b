#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "base/status.h"

namespace dovetail::transport::ucx {

// Whether this build has UCX's device API; else kFailedPrecondition says what it was built with and what would help.
absl::Status DeviceLinksBuilt();

class DeviceLink;

// What GPU memory of this process crosses to GPUs of other processes with: a ucp_context and a worker of their own,
// with UCX's cuda_ipc lane and its device API. One a process and GPU; reactor-owned. The GPU must be the calling
// thread's current one in all calls here and of DeviceLink.
class DeviceLinks {
 public:
  // The address, as the GPU's kernels may use it, of element `index` of a remote memory list of UCX's device API.
  using Resolve = std::function<absl::StatusOr<void*>(void* list, unsigned index)>;

  // kFailedPrecondition: as DeviceLinksBuilt, or this host has no such lane.
  static absl::StatusOr<std::unique_ptr<DeviceLinks>> Create(Resolve resolve);
  ~DeviceLinks();  // after all links

 private:
  friend class DeviceLink;
  struct State;
  explicit DeviceLinks(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

// A piece of this GPU's memory that one peer's kernels may store into, and one of the peer's that kernels here may.
// Both sides tell each other their offers, over the control plane or frames, accept, and call Progress until the link
// is there; from then on no host has a part in what crosses.
//
// While a link lives the peer's memory stays mapped, also when its process has ended: kernels that still store there do
// no harm. A link must therefore outlive the kernels that use it, and `memory` the link and the peer's process.
// Reactor-owned.
class DeviceLink {
 public:
  // `memory` is cudaMalloc's, of at least kTouched bytes more than the two sides use: the last kTouched are written
  // while the link is made. `links` outlives it.
  static constexpr size_t kTouched = 256;
  static absl::StatusOr<std::unique_ptr<DeviceLink>> Create(DeviceLinks& links, void* memory, size_t bytes,
                                                            absl::Duration patience = absl::Seconds(10));
  ~DeviceLink();

  const std::string& offer() const;  // for the peer, opaque
  // kFailedPrecondition: another build of UCX, or another host; one line says so. kInvalidArgument: that is no offer.
  // Once; not after an error.
  absl::Status Accept(std::string_view offer);
  // True once peer_memory() is there. To be called until the peer has said that its link is there, too.
  // kDeadlineExceeded after `patience` from Accept on; kFailedPrecondition: no lane on which kernels reach the peer's
  // memory.
  absl::StatusOr<bool> Progress();

  std::byte* peer_memory() const;  // as kernels here see it
  size_t peer_bytes() const;       // without those touched

 private:
  struct State;
  explicit DeviceLink(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace dovetail::transport::ucx
