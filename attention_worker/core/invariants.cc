#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/core/attention_worker_core.h"

// What must be true of the attention worker's records between two frames, part by part.

namespace dovetail::attention {

absl::Status BlockPool::CheckInvariants() const {
  std::vector<bool> seen(capacity_);
  size_t blocks = 0;
  bool once = true;
  const auto see = [&](KvBlockId block) {
    once = once && block < capacity_ && !seen[block];
    if (block < capacity_) seen[block] = true;
    ++blocks;
  };
  for (const KvBlockId block : free_) see(block);
  for (const Set& set : sets_)
    if (set.allocated)
      for (const KvBlockId block : set.blocks) see(block);
  if (!once) return Internal("a KV block is in two places");
  if (blocks != capacity_) return Internal(blocks, " KV blocks are free or in a set, of ", capacity_);
  return absl::OkStatus();
}

absl::Status PrefixIndex::CheckInvariants() const {
  if (by_key_.size() != by_set_.size()) return Internal("a set can be found twice, or a name leads to none");
  uint32_t blocks[kLists] = {};
  size_t evictable = 0;
  for (const auto& [set, entry] : by_set_) {
    const auto named = by_key_.find(entry.key);
    if (named == by_key_.end() || named->second != set) return Internal("a set is not found by its name");
    if (!pool_.Holds(set)) return Internal("a set that was freed can be found");
    if (entry.evictable.has_value() != (pool_.references(set) == 0))
      return Internal("a set with ", pool_.references(set), " references is ", entry.evictable ? "" : "not ",
                      "evictable");
    if (!entry.evictable) continue;
    if ((*entry.evictable)->set != set) return Internal("a set has the place of another one in the order of eviction");
    blocks[entry.list] += static_cast<uint32_t>(pool_.blocks(set).size());
    ++evictable;
  }
  size_t listed = 0;
  for (int list = 0; list < kLists; ++list) {
    listed += lists_[list].sets.size();
    if (lists_[list].blocks != blocks[list])
      return Internal(blocks[list], " blocks are evictable, not ", lists_[list].blocks);
  }
  if (listed != evictable) return Internal(evictable, " sets are evictable, not ", listed);
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckInvariants() const {
  DT_RETURN_IF_ERROR(pool_.CheckInvariants());
  DT_RETURN_IF_ERROR(index_.CheckInvariants());
  absl::flat_hash_map<BlockSetId, uint32_t> references;
  for (const auto& [pin, sets] : pins_)
    for (const BlockSetId set : sets.sets) ++references[set];
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->id != id) return Internal("sequence ", id.value(), " is known by another id");
    for (const ShardState& shard : sequence->shards) {
      if (shard.left_by_window > static_cast<int64_t>(shard.sets.size()))
        return Internal("sequence ", id.value(), " left more blocks behind than it had");
      const bool gaps = std::find(shard.sets.begin(), shard.sets.end(), kNoBlockSet) != shard.sets.end();
      if (gaps && table_.softmax(shard.shard.group).window == 0)
        return Internal("sequence ", id.value(), " has gaps in a shard without a window");
      for (const BlockSetId set : shard.sets)
        if (set != kNoBlockSet) ++references[set];
    }
  }
  for (const auto& [set, count] : references) {
    if (!pool_.Holds(set)) return Internal("a sequence or a pin holds a set that was freed");
    if (pool_.references(set) != count)
      return Internal("a set has ", pool_.references(set), " references, and ", count, " are held");
  }
  const WorkerStatus now = status();
  uint64_t in_use = 0;
  for (const auto& [set, count] : references) in_use += pool_.blocks(set).size();
  if (in_use != now.blocks_in_use) return Internal(in_use, " blocks are held, and ", now.blocks_in_use, " in use");
  return absl::OkStatus();
}

absl::Status AttentionWorkerCore::CheckInvariants() const {
  DT_RETURN_IF_ERROR(sequences_.CheckInvariants());
  for (const MicroBatch& batch : micro_batches_) {
    const uint32_t bit = uint32_t{1} << (&batch - micro_batches_.data());
    const bool held = batch.held_query.has_value() || batch.held_key_value.has_value();
    if (held && !batch.part.in_group()) return Internal("a frame is held for no prefill group");
    if (batch.phase == Phase::kIdle) continue;
    if (batch.next_op < 0 || batch.next_op >= table_.op_count())
      return Internal("step ", batch.step.value(), " is at op ", batch.next_op, " of ", table_.op_count());
    const int pieces = batch.layouts[table_.op_group[batch.next_op].value()].pieces;
    if (batch.pieces_given > batch.pieces_asked || batch.pieces_asked > pieces)
      return Internal("step ", batch.step.value(), " gave ", batch.pieces_given, " pieces of ", batch.pieces_asked,
                      " that were asked for, of ", pieces);
    if (batch.phase == Phase::kGiveRows && (batch.pieces_given < batch.pieces_asked || batch.pieces_given == pieces))
      return Internal("step ", batch.step.value(), " does not give the rows that it could");
    for (const SequenceState* sequence : batch.sequences) {
      if (sequence == nullptr || sequences_.Find(sequence->id) != sequence)
        return Internal("step ", batch.step.value(), " contains a sequence that was released");
      if ((sequence->micro_batches & bit) == 0)
        return Internal("sequence ", sequence->id.value(), " does not know of its step ", batch.step.value());
    }
  }
  for (const OutgoingMove& move : moves_)
    if (move.active && sequences_.Find(move.order.sequence) == nullptr)
      return Internal("sequence ", move.order.sequence.value(), " moves away and is not here");
  return absl::OkStatus();
}

}  // namespace dovetail::attention
