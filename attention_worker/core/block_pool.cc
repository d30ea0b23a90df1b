#include "attention_worker/core/block_pool.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace dovetail::attention {

BlockPool::BlockPool(uint32_t capacity_blocks) : capacity_(capacity_blocks) {
  free_.reserve(capacity_blocks);
  for (uint32_t id = capacity_blocks; id > 0; --id) free_.push_back(id - 1);
}

const BlockPool::Set& BlockPool::At(BlockSetId set) const {
  DT_CHECK(Holds(set), "block set ", PlaceOf(set), " of generation ", GenerationOf(set), " is not allocated");
  return sets_[PlaceOf(set)];
}

BlockSetId BlockPool::Allocate(uint32_t blocks) {
  DT_CHECK(blocks > 0);
  if (free_.size() < blocks) return kNoBlockSet;
  if (free_places_.empty()) {
    free_places_.push_back(static_cast<uint32_t>(sets_.size()));
    sets_.emplace_back();
  }
  const uint32_t place = free_places_.back();
  free_places_.pop_back();
  Set& set = sets_[place];
  set.allocated = true;
  set.references = 1;
  ++set.generation;
  set.digest.reset();
  set.blocks.assign(free_.end() - blocks, free_.end());
  free_.resize(free_.size() - blocks);
  for (const KvBlockId block : set.blocks) begun_ = std::max(begun_, block + 1);
  return BlockSetId{set.generation} << 32 | place;
}

void BlockPool::AddReference(BlockSetId set) { ++At(set).references; }

uint32_t BlockPool::DropReference(BlockSetId set) {
  DT_CHECK(At(set).references > 0);
  return --At(set).references;
}

void BlockPool::Free(BlockSetId id) {
  Set& set = At(id);
  DT_CHECK(set.references == 0, "block set ", PlaceOf(id), " is freed while in use");
  set.allocated = false;
  free_.insert(free_.end(), set.blocks.begin(), set.blocks.end());
  if (keep_freed_) freed_.insert(freed_.end(), set.blocks.begin(), set.blocks.end());
  set.blocks.clear();
  free_places_.push_back(PlaceOf(id));
}

std::vector<KvBlockId> BlockPool::TakeFreed() {
  if (freed_.empty()) return {};
  std::vector<bool> in_use(capacity_, true);
  for (const KvBlockId block : free_) in_use[block] = false;
  std::erase_if(freed_, [&](KvBlockId block) { return in_use[block]; });
  return std::exchange(freed_, {});
}

}  // namespace dovetail::attention
