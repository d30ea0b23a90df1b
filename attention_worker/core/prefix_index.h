#pragma once
#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/core/block_pool.h"
#include "base/status.h"
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
// used first.
//
// Snapshots of linear states are large, a prompt leaves one every 64 tokens, and most are never asked for: only where
// prompts part or a conversation goes on does one help. So unreferenced snapshots have a budget of their own, and in it
// those that were useful (begun from, or the last of their sequence) outlive those that a sequence merely passed: a
// passed one goes first as long as they are more than a quarter.
// Threads: thread-compatible.
class PrefixIndex {
 public:
  // `snapshot_blocks`: KvBlocks that unreferenced snapshots may keep.
  explicit PrefixIndex(BlockPool& pool, uint32_t snapshot_blocks = UINT32_MAX)
      : pool_(pool), snapshot_blocks_(snapshot_blocks) {}

  enum class Content : uint8_t { kTokens, kSnapshot };

  struct Change {
    PrefixKey key;
    bool findable = false;  // false: no longer
  };

  // From now on what becomes findable, or ceases to be, is kept until TakeChanges is called.
  void KeepChanges() { keep_changes_ = true; }
  std::vector<Change> TakeChanges() { return std::exchange(changes_, {}); }
  bool has_changes() const { return !changes_.empty(); }

  // Makes a full, committed set findable. False when the key or the set is known already: the set then stays anonymous.
  bool Insert(const PrefixKey& key, BlockSetId set, Content content = Content::kTokens);

  // A snapshot in use has proved useful. Nothing happens to other sets.
  void MarkUseful(BlockSetId set);

  // The set of this content, or kNoBlockSet. Takes no reference. A set that was freed although it has a name loses it.
  BlockSetId Find(const PrefixKey& key);

  // Takes a reference to a set found here; an evictable one is evictable no longer.
  void Acquire(BlockSetId set);

  // Drops a reference. An unreferenced set becomes evictable if it is findable, else it is freed. Snapshots beyond
  // their budget are freed.
  void Release(BlockSetId set);

  // A set in use is about to change: its content cannot be found any more. Nothing happens if it could not.
  void Forget(BlockSetId set);

  // A set is damaged: its content cannot be found any more, and it is freed once it has no reference. Nothing happens
  // if it could not be found.
  void Discard(BlockSetId set);

  // What the set was inserted as; nothing if it cannot be found.
  std::optional<PrefixKey> KeyOf(BlockSetId set) const;

  // Frees evictable sets, oldest first (of snapshots: the next to go), until the pool has `blocks` free ones. False if
  // even all would not do (then nothing is freed).
  bool MakeRoom(uint32_t blocks);

  uint32_t evictable_blocks() const { return lists_[kTokens].blocks + evictable_snapshot_blocks(); }
  uint32_t evictable_snapshot_blocks() const { return lists_[kPassed].blocks + lists_[kUseful].blocks; }
  size_t size() const { return by_set_.size(); }

  // Errors: kInternal says what is not so: a bug.
  absl::Status CheckInvariants() const;

 private:
  enum List { kTokens, kPassed, kUseful, kLists };
  struct Evictable {
    BlockSetId set = kNoBlockSet;
    uint64_t since = 0;   // counts releases
    uint32_t blocks = 0;  // of the set
  };
  struct Lru {
    std::list<Evictable> sets;  // front: evicted next
    uint32_t blocks = 0;
  };
  struct Entry {
    PrefixKey key;
    List list = kTokens;
    std::optional<std::list<Evictable>::iterator> evictable;  // its place in its list while unreferenced
  };

  List NextSnapshotList() const;
  void EvictOldest(List list);
  void TakeFromEvictable(Entry& entry);
  void Note(const PrefixKey& key, bool findable) {
    if (keep_changes_) changes_.push_back({key, findable});
  }

  BlockPool& pool_;
  const uint32_t snapshot_blocks_;
  absl::flat_hash_map<PrefixKey, BlockSetId> by_key_;  // looked up, never iterated: its order differs from run to run
  absl::flat_hash_map<BlockSetId, Entry> by_set_;
  Lru lists_[kLists];
  uint64_t releases_ = 0;
  bool keep_changes_ = false;
  std::vector<Change> changes_;
};

}  // namespace dovetail::attention
