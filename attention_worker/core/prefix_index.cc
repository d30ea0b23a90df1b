#include "attention_worker/core/prefix_index.h"

#include "base/check.h"

namespace dovetail::attention {

bool PrefixIndex::Insert(const PrefixKey& key, BlockSetId set) {
  if (by_key_.contains(key) || by_set_.contains(set)) return false;
  by_key_.emplace(key, set);
  by_set_.emplace(set, Entry{key, std::nullopt});
  return true;
}

BlockSetId PrefixIndex::Find(const PrefixKey& key) const {
  const auto it = by_key_.find(key);
  return it == by_key_.end() ? kNoBlockSet : it->second;
}

void PrefixIndex::Acquire(BlockSetId set) {
  pool_.AddReference(set);
  const auto it = by_set_.find(set);
  if (it == by_set_.end() || !it->second.evictable) return;
  lru_.erase(*it->second.evictable);
  it->second.evictable.reset();
  evictable_blocks_ -= static_cast<uint32_t>(pool_.blocks(set).size());
}

void PrefixIndex::Release(BlockSetId set) {
  if (pool_.DropReference(set) > 0) return;
  const auto it = by_set_.find(set);
  if (it == by_set_.end()) {
    pool_.Free(set);
    return;
  }
  it->second.evictable = lru_.insert(lru_.end(), set);
  evictable_blocks_ += static_cast<uint32_t>(pool_.blocks(set).size());
}

void PrefixIndex::Forget(BlockSetId set) {
  const auto it = by_set_.find(set);
  if (it == by_set_.end()) return;
  DT_CHECK(!it->second.evictable, "a set that nobody uses does not change");
  by_key_.erase(it->second.key);
  by_set_.erase(it);
}

bool PrefixIndex::MakeRoom(uint32_t blocks) {
  if (pool_.free_blocks() + evictable_blocks_ < blocks) return false;
  while (pool_.free_blocks() < blocks) {
    const BlockSetId oldest = lru_.front();
    lru_.pop_front();
    const auto it = by_set_.find(oldest);
    DT_CHECK(it != by_set_.end());
    by_key_.erase(it->second.key);
    by_set_.erase(it);
    evictable_blocks_ -= static_cast<uint32_t>(pool_.blocks(oldest).size());
    pool_.Free(oldest);
  }
  return true;
}

}  // namespace dovetail::attention
