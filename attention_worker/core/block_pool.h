#pragma once
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace dovetail::attention {

// A KvBlock: 64 tokens of K and V of one KV head of one attention op; an index into the worker's arena. Never leaves
// the worker.
using KvBlockId = uint32_t;

// A block set: the KvBlocks of one shard (its ops x its KV heads) for the same 64 tokens. Allocated, shared, hashed and
// freed together.
using BlockSetId = uint32_t;
inline constexpr BlockSetId kNoBlockSet = ~BlockSetId{0};

// All KvBlocks of a worker, handed out as reference-counted sets. Every KvBlock is in exactly one set or free; a set
// that is allocated again gets a new generation, so that a stale reference shows. Thread-compatible. Allocation touches
// no heap once sets are recycled.
class BlockPool {
 public:
  explicit BlockPool(uint32_t capacity_blocks);

  uint32_t capacity() const { return capacity_; }
  uint32_t free_blocks() const { return static_cast<uint32_t>(free_.size()); }

  // A set of `blocks` KvBlocks with one reference, or kNoBlockSet when fewer are free.
  BlockSetId Allocate(uint32_t blocks);

  void AddReference(BlockSetId set);
  // Drops one reference; returns how many are left. At 0 the set is not freed: its owner decides (the prefix index may
  // keep it).
  uint32_t DropReference(BlockSetId set);
  // Gives the blocks of an unreferenced set back.
  void Free(BlockSetId set);

  // From now on what is freed is kept for TakeFreed: the blocks freed since it was called last that are still free.
  void KeepFreed() { keep_freed_ = true; }
  std::vector<KvBlockId> TakeFreed();

  uint32_t references(BlockSetId set) const { return sets_[set].references; }
  uint32_t generation(BlockSetId set) const { return sets_[set].generation; }
  const std::vector<KvBlockId>& blocks(BlockSetId set) const { return sets_[set].blocks; }

 private:
  struct Set {
    std::vector<KvBlockId> blocks;
    uint32_t references = 0;
    uint32_t generation = 0;
    bool allocated = false;
  };

  const uint32_t capacity_;
  std::vector<KvBlockId> free_;
  std::vector<Set> sets_;
  std::vector<BlockSetId> free_sets_;
  bool keep_freed_ = false;
  std::vector<KvBlockId> freed_;
};

}  // namespace dovetail::attention
