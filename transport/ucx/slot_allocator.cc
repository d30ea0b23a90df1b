#include "transport/ucx/slot_allocator.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace dovetail::transport::ucx {

SlotAllocator::SlotAllocator(uint64_t bytes) {
  const uint64_t count = std::bit_floor(bytes / kSmallestSlot);
  if (count == 0) return;
  const int top = std::countr_zero(count);
  blocks_.resize(count);
  free_.assign(top + 1, kEnd);
  kept_.resize(top + 1);
  PushFree(0, top);
}

void SlotAllocator::PushFree(int32_t block, int order) {
  blocks_[block] = Block{kFree, static_cast<uint8_t>(order), free_[order], kEnd};
  if (free_[order] != kEnd) blocks_[free_[order]].previous = block;
  free_[order] = block;
}

void SlotAllocator::Unlink(int32_t block) {
  const Block& b = blocks_[block];
  (b.previous == kEnd ? free_[b.order] : blocks_[b.previous].next) = b.next;
  if (b.next != kEnd) blocks_[b.next].previous = b.previous;
  blocks_[block].state = kInside;
}

uint64_t SlotAllocator::Allocate(uint64_t bytes) {
  const uint64_t wanted = std::bit_ceil((bytes + kSmallestSlot - 1) / kSmallestSlot + (bytes == 0 ? 1 : 0));
  const size_t order = std::countr_zero(wanted);
  if (order >= free_.size()) return kNone;
  if (Kept& kept = kept_[order]; kept.count > 0) {
    const int32_t block = kept.blocks[--kept.count];
    blocks_[block].state = kUsed;
    used_ += uint64_t{1} << order;
    return static_cast<uint64_t>(block) * kSmallestSlot;
  }
  size_t from = order;
  while (from < free_.size() && free_[from] == kEnd) ++from;
  if (from >= free_.size()) return UniteKept() ? Allocate(bytes) : kNone;
  const int32_t block = free_[from];
  Unlink(block);
  while (from > order) {
    --from;
    PushFree(block + (1 << from), static_cast<int>(from));
  }
  blocks_[block] = Block{kUsed, static_cast<uint8_t>(order), kEnd, kEnd};
  used_ += uint64_t{1} << order;
  return static_cast<uint64_t>(block) * kSmallestSlot;
}

void SlotAllocator::Free(uint64_t offset) {
  const auto block = static_cast<int32_t>(offset / kSmallestSlot);
  DT_CHECK(offset % kSmallestSlot == 0 && static_cast<size_t>(block) < blocks_.size() && blocks_[block].state == kUsed);
  const size_t order = blocks_[block].order;
  used_ -= uint64_t{1} << order;
  blocks_[block].state = kInside;
  Kept& kept = kept_[order];
  if (kept.count == kMostKept) {
    Unite(kept.blocks[0]);
    std::copy(kept.blocks + 1, kept.blocks + kMostKept, kept.blocks);
    --kept.count;
  }
  kept.blocks[kept.count++] = block;
}

bool SlotAllocator::UniteKept() {
  bool any = false;
  for (Kept& kept : kept_) {
    any = any || kept.count > 0;
    while (kept.count > 0) Unite(kept.blocks[--kept.count]);
  }
  return any;
}

void SlotAllocator::Unite(int32_t block) {
  size_t order = blocks_[block].order;
  for (; order + 1 < free_.size(); ++order) {
    const int32_t buddy = block ^ (1 << order);
    if (blocks_[buddy].state != kFree || blocks_[buddy].order != order) break;
    Unlink(buddy);
    block &= ~(1 << order);
  }
  PushFree(block, static_cast<int>(order));
}

}  // namespace dovetail::transport::ucx
