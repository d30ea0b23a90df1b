#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"

namespace dovetail::attention {

// A KvBlock: 64 tokens of K and V of one KV head of one attention op; an index into the worker's arena. Never leaves
// the worker.
using KvBlockId = uint32_t;

// A block set: the KvBlocks of one shard (its ops x its KV heads) for the same 64 tokens. Allocated, shared, hashed and
// freed together. The id holds the place in the pool (low half) and the generation (high half): a place that is used
// again gets the next generation, so an id always names the same allocation.
using BlockSetId = uint64_t;
inline constexpr BlockSetId kNoBlockSet = ~BlockSetId{0};
inline constexpr uint32_t PlaceOf(BlockSetId set) { return static_cast<uint32_t>(set); }
inline constexpr uint32_t GenerationOf(BlockSetId set) { return static_cast<uint32_t>(set >> 32); }

// All KvBlocks of a worker, handed out as reference-counted sets. Every KvBlock is in exactly one set or free. Where a
// stale id would do harm it stops the process: callers that cannot be sure ask Holds() first.
// Cost:    allocation touches no heap once places are used again.
// Threads: thread-compatible.
class BlockPool {
 public:
  explicit BlockPool(uint32_t capacity_blocks);

  uint32_t capacity() const { return capacity_; }
  uint32_t free_blocks() const { return static_cast<uint32_t>(free_.size()); }
  // Blocks of this number and above were never handed out.
  uint32_t begun() const { return begun_; }

  // Whether this allocation still exists. False for kNoBlockSet and for ids that were never given out.
  bool Holds(BlockSetId set) const {
    return PlaceOf(set) < sets_.size() && sets_[PlaceOf(set)].allocated &&
           sets_[PlaceOf(set)].generation == GenerationOf(set);
  }

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

  uint32_t references(BlockSetId set) const { return At(set).references; }
  const std::vector<KvBlockId>& blocks(BlockSetId set) const { return At(set).blocks; }

  // The digest of the blocks' bytes since the set was finished; nothing while it may still change.
  std::optional<uint64_t> digest(BlockSetId set) const { return At(set).digest; }
  void SetDigest(BlockSetId set, std::optional<uint64_t> digest) { At(set).digest = digest; }

  // Errors: kInternal says what is not so: a bug.
  absl::Status CheckInvariants() const;

 private:
  struct Set {
    std::vector<KvBlockId> blocks;
    uint32_t references = 0;
    uint32_t generation = 0;
    bool allocated = false;
    std::optional<uint64_t> digest;
  };
  const Set& At(BlockSetId set) const;
  Set& At(BlockSetId set) { return const_cast<Set&>(std::as_const(*this).At(set)); }

  const uint32_t capacity_;
  uint32_t begun_ = 0;
  std::vector<KvBlockId> free_;
  std::vector<Set> sets_;
  std::vector<uint32_t> free_places_;
  bool keep_freed_ = false;
  std::vector<KvBlockId> freed_;
};

}  // namespace dovetail::attention
