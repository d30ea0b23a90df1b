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
  uint32_t asleep;  // 1: the owner sleeps until UCX wakes it; a writer that changes it to 0 must wake the owner
  std::byte rest[4096 - 68];
  RingEntry ring[kRingEntries];
};
static_assert(offsetof(RegionFront, asleep) == 64 && offsetof(RegionFront, ring) == 4096);

// How the two ends touch what both see. Tests put a machine in its place that reorders all that it may.
// Threads: thread-safe.
struct CpuMemory {
  void Write(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }
  void Read(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }
  // A LoadAcquire that returns `value` sees all that was written before the store.
  void StoreRelease(uint64_t& word, uint64_t value) const {
    std::atomic_ref(word).store(value, std::memory_order_release);
  }
  uint64_t LoadAcquire(uint64_t& word) const { return std::atomic_ref(word).load(std::memory_order_acquire); }
  void Store(uint32_t& word, uint32_t value) const { std::atomic_ref(word).store(value, std::memory_order_relaxed); }
  uint32_t Load(uint32_t& word) const { return std::atomic_ref(word).load(std::memory_order_relaxed); }
  uint32_t Exchange(uint32_t& word, uint32_t value) const { return std::atomic_ref(word).exchange(value); }
  // No load after it takes place before a store ahead of it is seen by the other end.
  void Fence() const { std::atomic_thread_fence(std::memory_order_seq_cst); }
};

// The writing peer's end. Never blocks.
// Ownership: the region outlives it.
// Threads: reactor-owned.
template <typename Memory>
class BasicRingWriter {
 public:
  explicit BasicRingWriter(RegionFront* front, Memory memory = {}) : front_(front), memory_(memory) {}

  // The reader that pops the header sees everything stored before. Returns true if the owner sleeps: then this caller,
  // and no other, must wake it.
  bool Push(const WireHeader& header) {
    RingEntry& entry = front_->ring[next_ % kRingEntries];
    memory_.Write(&entry.header, &header, sizeof(header));
    memory_.StoreRelease(entry.stamp, ++next_);
    // Either this sees the owner asleep, or the owner, which says so before it looks a last time, sees the entry.
    memory_.Fence();
    return memory_.Load(front_->asleep) == 1 && memory_.Exchange(front_->asleep, 0) == 1;
  }

 private:
  RegionFront* front_;
  uint64_t next_ = 0;
  [[no_unique_address]] Memory memory_;
};

// The owner's end.
// Ownership: the region outlives it.
// Threads: reactor-owned.
template <typename Memory>
class BasicRingReader {
 public:
  explicit BasicRingReader(RegionFront* front, Memory memory = {}) : front_(front), memory_(memory) {}

  bool Ready() const { return memory_.LoadAcquire(front_->ring[next_ % kRingEntries].stamp) == next_ + 1; }

  // Copies the next header out, so that the peer cannot change it after it is checked. Requires Ready().
  void Pop(WireHeader& header) { memory_.Read(&header, &front_->ring[next_++ % kRingEntries].header, sizeof(header)); }

  // From before the last look at Ready() until this node polls again.
  void SetAsleep(bool asleep) {
    memory_.Store(front_->asleep, asleep ? 1 : 0);
    memory_.Fence();
  }

 private:
  RegionFront* front_;
  uint64_t next_ = 0;
  [[no_unique_address]] Memory memory_;
};

using RingWriter = BasicRingWriter<CpuMemory>;
using RingReader = BasicRingReader<CpuMemory>;

}  // namespace dovetail::transport::ucx
