#include "attention_worker/core/block_pool.h"

#include <utility>

#include "base/check.h"

namespace dovetail::attention {

BlockPool::BlockPool(uint32_t capacity_blocks) : capacity_(capacity_blocks) {
  free_.reserve(capacity_blocks);
  for (uint32_t id = capacity_blocks; id > 0; --id) free_.push_back(id - 1);
}

BlockSetId BlockPool::Allocate(uint32_t blocks) {
  DT_CHECK(blocks > 0);
  if (free_.size() < blocks) return kNoBlockSet;
  BlockSetId id;
  if (free_sets_.empty()) {
    id = static_cast<BlockSetId>(sets_.size());
    sets_.emplace_back();
  } else {
    id = free_sets_.back();
    free_sets_.pop_back();
  }
  Set& set = sets_[id];
  DT_CHECK(!set.allocated);
  set.allocated = true;
  set.references = 1;
  ++set.generation;
  set.blocks.assign(free_.end() - blocks, free_.end());
  free_.resize(free_.size() - blocks);
  return id;
}

void BlockPool::AddReference(BlockSetId set) {
  DT_CHECK(sets_[set].allocated);
  ++sets_[set].references;
}

uint32_t BlockPool::DropReference(BlockSetId set) {
  DT_CHECK(sets_[set].allocated && sets_[set].references > 0);
  return --sets_[set].references;
}

void BlockPool::Free(BlockSetId id) {
  Set& set = sets_[id];
  DT_CHECK(set.allocated && set.references == 0, "block set ", id, " is freed while in use or twice");
  set.allocated = false;
  free_.insert(free_.end(), set.blocks.begin(), set.blocks.end());
  if (keep_freed_) freed_.insert(freed_.end(), set.blocks.begin(), set.blocks.end());
  set.blocks.clear();
  free_sets_.push_back(id);
}

std::vector<KvBlockId> BlockPool::TakeFreed() {
  if (freed_.empty()) return {};
  std::vector<bool> in_use(capacity_, true);
  for (const KvBlockId block : free_) in_use[block] = false;
  std::erase_if(freed_, [&](KvBlockId block) { return in_use[block]; });
  return std::exchange(freed_, {});
}

}  // namespace dovetail::attention
