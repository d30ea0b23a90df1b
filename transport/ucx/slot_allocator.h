#pragma once
#include <cstdint>
#include <vector>

namespace dovetail::transport::ucx {

// Hands out slots of a peer's receive region: a buddy allocator, since tensors are freed in another order than they
// were sent. The slot last freed of a size is the next one used, so that it is still in a cache.
// Threads: thread-compatible; allocates only in the constructor; O(log size) otherwise.
class SlotAllocator {
 public:
  static constexpr uint64_t kSmallestSlot = 4096;
  static constexpr uint64_t kNone = ~uint64_t{0};

  // For a region of `bytes`, of which the largest power of two is used.
  explicit SlotAllocator(uint64_t bytes);

  // The offset of a slot of at least `bytes`, aligned to its size; kNone if there is none.
  uint64_t Allocate(uint64_t bytes);
  void Free(uint64_t offset);  // as Allocate gave it

  uint64_t bytes_used() const { return used_ * kSmallestSlot; }

 private:
  static constexpr int32_t kEnd = -1;
  enum State : uint8_t { kInside, kFree, kUsed };  // kInside: no slot begins here
  struct Block {
    State state = kInside;
    uint8_t order = 0;
    int32_t next = kEnd, previous = kEnd;  // in the free list of its order
  };

  // Slots freed last are kept whole: a layer loop frees what it allocates next, and would otherwise split and unite
  // every order up to the whole region each time.
  static constexpr int kMostKept = 4;
  struct Kept {
    int32_t blocks[kMostKept];
    int count = 0;
  };

  void PushFree(int32_t block, int order);
  void Unlink(int32_t block);
  void Unite(int32_t block);  // frees it, with its buddies as far as they are free
  bool UniteKept();           // false: there are none

  std::vector<Block> blocks_;
  std::vector<int32_t> free_;  // first free slot by order
  std::vector<Kept> kept_;     // by order, the last one freed last
  uint64_t used_ = 0;
};

}  // namespace dovetail::transport::ucx
