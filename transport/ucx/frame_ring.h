#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "transport/fabric.h"
#include "transport/ucx/wire.h"

// The notifications of a receive region: headers of frames whose payload is in the region, or that have none. They lie
// before the region's data, where the one peer that may write the region leaves them and its owner polls for them: a
// store of 128 bytes in place of an active message. Each side trusts nothing that the other could have written.

namespace dovetail::transport::ucx {

// As many entries as a peer may have unread frames: it can never be full for a peer that keeps to its credit, and one
// that does not overwrites what it wrote itself.
inline constexpr uint64_t kRingEntries = kMaxFramesInFlight;

struct RingEntry {
  WireHeader header;
  uint64_t stamp = 0;  // 1 + how many entries were written before, stored last
};
static_assert(sizeof(RingEntry) == 128 && alignof(RingEntry) == 8);

// The first page of a region, and the ring behind it.
struct RegionFront {
  uint64_t token;
  std::byte unused[56];
  uint32_t asleep;  // 1: the owner will not look before something of UCX wakes it; whoever turns it to 0 does so
  std::byte rest[4096 - 68];
  RingEntry ring[kRingEntries];
};
static_assert(offsetof(RegionFront, asleep) == 64 && offsetof(RegionFront, ring) == 4096);

// The writing peer's end. Reactor-owned; the region outlives it. Never blocks.
class RingWriter {
 public:
  explicit RingWriter(RegionFront* front) : front_(front) {}

  // Everything stored before is seen by who pops the header. True: the owner sleeps and is to be woken, which falls to
  // this caller alone.
  bool Push(const WireHeader& header) {
    RingEntry& entry = front_->ring[next_ % kRingEntries];
    std::memcpy(&entry.header, &header, sizeof(header));
    std::atomic_ref(entry.stamp).store(++next_, std::memory_order_release);
    // Either this sees the owner asleep, or the owner, which says so before it looks a last time, sees the entry.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::atomic_ref asleep(front_->asleep);
    return asleep.load(std::memory_order_relaxed) == 1 && asleep.exchange(0) == 1;
  }

 private:
  RegionFront* front_;
  uint64_t next_ = 0;
};

// The owner's end. Reactor-owned; the region outlives it.
class RingReader {
 public:
  explicit RingReader(RegionFront* front) : front_(front) {}

  bool Ready() const {
    return std::atomic_ref(front_->ring[next_ % kRingEntries].stamp).load(std::memory_order_acquire) == next_ + 1;
  }

  // Copies the next header out, so that nobody can change it once it is checked; Ready() holds.
  void Pop(WireHeader& header) {
    std::memcpy(&header, &front_->ring[next_++ % kRingEntries].header, sizeof(header));
  }

  // From before the last look at Ready() until this node polls again.
  void SetAsleep(bool asleep) { std::atomic_ref(front_->asleep).store(asleep ? 1 : 0, std::memory_order_seq_cst); }

 private:
  RegionFront* front_;
  uint64_t next_ = 0;
};

}  // namespace dovetail::transport::ucx
