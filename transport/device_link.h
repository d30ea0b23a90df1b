#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace dovetail::transport {

// A piece of this process's GPU memory that one peer's kernels may store into, and one of the peer's that kernels here
// may. Both sides tell each other their offers, over the control plane or in frames, accept, and call Progress until
// both links are there; from then on no host has a part in what crosses.
//
// While a link lives the peer's memory stays mapped, also when its process has ended: kernels that still store there do
// no harm. A link must therefore outlive the kernels that use it, and its memory the link and the peer's process.
// Threads: reactor-owned; the GPU must be the calling thread's current one.
class DeviceLink {
 public:
  static constexpr size_t kTouched = 256;  // the last bytes of the memory are written while the link is made
  virtual ~DeviceLink() = default;

  virtual const std::string& offer() const = 0;  // for the peer, opaque
  // kFailedPrecondition: another build of UCX, or another host; one line says so. kInvalidArgument: that is no offer.
  // Once; not after an error.
  virtual absl::Status Accept(std::string_view offer) = 0;
  // True once peer_memory() is there. To be called until the peer has said that its link is there, too.
  // kDeadlineExceeded if that takes too long; kFailedPrecondition: no lane on which kernels reach the peer's memory.
  virtual absl::StatusOr<bool> Progress() = 0;

  virtual std::byte* peer_memory() const = 0;  // as kernels here see it
};

// What links are made with: one a process and GPU. Outlives its links.
// Threads: reactor-owned, as DeviceLink.
class DeviceLinks {
 public:
  virtual ~DeviceLinks() = default;
  // `memory` is cudaMalloc's, of at least kTouched bytes more than the two sides use.
  virtual absl::StatusOr<std::unique_ptr<DeviceLink>> Link(void* memory, size_t bytes) = 0;
};

}  // namespace dovetail::transport
