#pragma once
#include <cstdint>
#include <list>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/core/block_pool.h"
#include "proto/block_hash.h"
#include "proto/placement.h"

namespace dovetail::attention {

// What a block set holds: which tokens (the chain hash covers all before them, model, KV dtype and salt), of which
// layer group and which KV heads.
struct PrefixKey {
  proto::BlockHash hash{};
  uint16_t group = 0;
  uint16_t head_begin = 0;
  uint16_t head_end = 0;

  bool operator==(const PrefixKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixKey& key) {
    return H::combine(std::move(h), key.hash[0], key.hash[1], key.group, key.head_begin, key.head_end);
  }
};

// Block sets that can be found by content. A set with references is in use; one without is evictable, least recently
// used first. Thread-compatible.
class PrefixIndex {
 public:
  explicit PrefixIndex(BlockPool& pool) : pool_(pool) {}

  // Makes a full, committed set findable. False when the key or the set is known already: the set then stays anonymous.
  bool Insert(const PrefixKey& key, BlockSetId set);

  // The set of this content, or kNoBlockSet. Takes no reference.
  BlockSetId Find(const PrefixKey& key) const;

  // Takes a reference to a set found here; an evictable one is evictable no longer.
  void Acquire(BlockSetId set);

  // Drops a reference. An unreferenced set becomes evictable if it is findable, else it is freed.
  void Release(BlockSetId set);

  // A set in use is about to change: its content cannot be found any more. Nothing happens if it could not.
  void Forget(BlockSetId set);

  // Frees evictable sets, oldest first, until the pool has `blocks` free ones. False if even all would not do (then
  // nothing is freed).
  bool MakeRoom(uint32_t blocks);

  uint32_t evictable_blocks() const { return evictable_blocks_; }
  size_t size() const { return by_set_.size(); }

 private:
  struct Entry {
    PrefixKey key;
    std::optional<std::list<BlockSetId>::iterator> evictable;  // its place in lru_ while unreferenced
  };

  BlockPool& pool_;
  absl::flat_hash_map<PrefixKey, BlockSetId> by_key_;  // looked up, never iterated: its order differs from run to run
  absl::flat_hash_map<BlockSetId, Entry> by_set_;
  std::list<BlockSetId> lru_;                          // front: evicted next
  uint32_t evictable_blocks_ = 0;
};

}  // namespace dovetail::attention
