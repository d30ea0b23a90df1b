#include "attention_worker/core/prefix_index.h"

#include "base/check.h"

namespace dovetail::attention {

bool PrefixIndex::Insert(const PrefixKey& key, BlockSetId set, Content content) {
  if (by_key_.contains(key) || by_set_.contains(set)) return false;
  by_key_.emplace(key, set);
  by_set_.emplace(set, Entry{key, content == Content::kSnapshot ? kPassed : kTokens, std::nullopt});
  Note(key, true);
  return true;
}

void PrefixIndex::MarkUseful(BlockSetId set) {
  const auto it = by_set_.find(set);
  if (it == by_set_.end() || it->second.list == kTokens) return;
  DT_CHECK(!it->second.evictable, "no sequence uses the set yet");
  it->second.list = kUseful;
}

BlockSetId PrefixIndex::Find(const PrefixKey& key) {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return kNoBlockSet;
  const BlockSetId set = it->second;
  if (pool_.Holds(set)) return set;
  Discard(set);
  return kNoBlockSet;
}

void PrefixIndex::Acquire(BlockSetId set) {
  pool_.AddReference(set);
  const auto it = by_set_.find(set);
  if (it == by_set_.end() || !it->second.evictable) return;
  TakeFromEvictable(it->second);
}

void PrefixIndex::TakeFromEvictable(Entry& entry) {
  Lru& list = lists_[entry.list];
  list.blocks -= (*entry.evictable)->blocks;
  list.sets.erase(*entry.evictable);
  entry.evictable.reset();
}

void PrefixIndex::Release(BlockSetId set) {
  if (pool_.DropReference(set) > 0) return;
  const auto it = by_set_.find(set);
  if (it == by_set_.end()) {
    pool_.Free(set);
    return;
  }
  Lru& list = lists_[it->second.list];
  const auto blocks = static_cast<uint32_t>(pool_.blocks(set).size());
  it->second.evictable = list.sets.insert(list.sets.end(), Evictable{set, releases_++, blocks});
  list.blocks += blocks;
  while (evictable_snapshot_blocks() > snapshot_blocks_) EvictOldest(NextSnapshotList());
}

// One of the two is not empty.
PrefixIndex::List PrefixIndex::NextSnapshotList() const {
  return lists_[kPassed].blocks > evictable_snapshot_blocks() / 4 ? kPassed : kUseful;
}

void PrefixIndex::EvictOldest(List list) { Discard(lists_[list].sets.front().set); }

void PrefixIndex::Forget(BlockSetId set) {
  const auto it = by_set_.find(set);
  if (it == by_set_.end()) return;
  DT_CHECK(!it->second.evictable, "a set that no sequence uses does not change");
  Note(it->second.key, false);
  by_key_.erase(it->second.key);
  by_set_.erase(it);
}

void PrefixIndex::Discard(BlockSetId set) {
  const auto it = by_set_.find(set);
  if (it == by_set_.end()) return;
  const bool unused = it->second.evictable.has_value();
  if (unused) TakeFromEvictable(it->second);
  Note(it->second.key, false);
  by_key_.erase(it->second.key);
  by_set_.erase(it);
  if (unused && pool_.Holds(set)) pool_.Free(set);
}

std::optional<PrefixKey> PrefixIndex::KeyOf(BlockSetId set) const {
  const auto it = by_set_.find(set);
  return it == by_set_.end() ? std::nullopt : std::optional<PrefixKey>(it->second.key);
}

bool PrefixIndex::MakeRoom(uint32_t blocks) {
  if (pool_.free_blocks() + evictable_blocks() < blocks) return false;
  while (pool_.free_blocks() < blocks) {
    if (evictable_blocks() == 0) return false;  // sets were freed although they had names
    List next = kTokens;
    if (evictable_snapshot_blocks() > 0) {
      const List snapshots = NextSnapshotList();
      const bool older =
          lists_[kTokens].sets.empty() || lists_[snapshots].sets.front().since < lists_[kTokens].sets.front().since;
      if (older) next = snapshots;
    }
    EvictOldest(next);
  }
  return true;
}

}  // namespace dovetail::attention
