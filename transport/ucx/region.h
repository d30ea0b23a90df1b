#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "transport/ucx/frame_ring.h"
#include "transport/ucx/process.h"

namespace dovetail::transport::ucx {

// Before a region's data lie its token and the ring of notifications.
inline constexpr uint64_t kRegionFrontBytes = sizeof(RegionFront);
static_assert(kRegionFrontBytes % 4096 == 0);

// Shared memory that one incarnation of one peer may PUT into: an object of its own, without a name, which the peer
// opens by this process and a descriptor of it. The system reuses the descriptor's number once the region is closed. A
// region therefore stays until no peer can open it (RetiredRegions), and a peer that opens it compares the token at its
// front. Pages take memory only when they are written.
// Threads: reactor-owned; other processes write to the memory at any time (frame_ring.h).
class ReceiveRegion {
 public:
  // kResourceExhausted: no memory or descriptors.
  static absl::StatusOr<std::unique_ptr<ReceiveRegion>> Create(uint64_t bytes);
  ~ReceiveRegion();

  const std::byte* data() const { return front_ + kRegionFrontBytes; }
  RegionFront* front() const { return reinterpret_cast<RegionFront*>(front_); }
  uint64_t size_bytes() const { return bytes_; }
  uint64_t token() const { return token_; }  // random
  uint32_t descriptor() const { return static_cast<uint32_t>(descriptor_); }

  // Gives the pages back to the system, but not the addresses: what is written from now on lands in fresh pages.
  void DropPages();

 private:
  ReceiveRegion() = default;

  int descriptor_ = -1;
  std::byte* front_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t token_ = 0;
};

// A peer's region, mapped here for writing until this object is destroyed. The memory stays when its owner ends or
// gives the region up; what is written after that is not read.
// Threads: reactor-owned.
class RemoteRegion {
 public:
  // kUnavailable: the owner has ended, or what it made was removed. kInvalidArgument: that is no region, or a smaller
  // one. Errors leave nothing behind.
  static absl::StatusOr<std::unique_ptr<RemoteRegion>> Open(const ProcessIdentity& owner, uint32_t descriptor,
                                                            uint64_t bytes, uint64_t token);
  ~RemoteRegion();

  std::byte* data() const { return front_ + kRegionFrontBytes; }
  RegionFront* front() const { return reinterpret_cast<RegionFront*>(front_); }

 private:
  RemoteRegion(std::byte* front, uint64_t bytes) : front_(front), bytes_(bytes) {}

  std::byte* const front_;
  const uint64_t bytes_;
};

}  // namespace dovetail::transport::ucx
