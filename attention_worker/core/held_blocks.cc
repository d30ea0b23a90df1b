#include <algorithm>
#include <utility>

#include "attention_worker/core/sequence_table.h"

// Whether what sequences refer to is still what was written for them: generations of sets, their places, digests.

namespace dovetail::attention {

std::vector<BlockSetId> SequenceTable::TakeFinished() {
  std::erase_if(finished_, [this](BlockSetId set) { return !pool_.Holds(set) || pool_.digest(set).has_value(); });
  return std::exchange(finished_, {});
}

std::vector<BlockSetId> SequenceTable::Digested(const SequenceState& sequence) const {
  std::vector<BlockSetId> sets;
  for (const ShardState& shard : sequence.shards)
    for (const BlockSetId set : shard.sets)
      if (pool_.Holds(set) && pool_.digest(set).has_value()) sets.push_back(set);
  return sets;
}

bool SequenceTable::TakeDigest(BlockSetId set, uint64_t digest) {
  if (!pool_.Holds(set)) return true;
  if (!pool_.digest(set).has_value()) {
    pool_.SetDigest(set, digest);
    return true;
  }
  if (pool_.digest(set) == digest) return true;
  // What is done to one sequence does not depend on the others, so neither does the result on the map's order.
  for (auto& [id, sequence] : sequences_) {
    const bool holds = std::any_of(sequence->shards.begin(), sequence->shards.end(), [&](const ShardState& shard) {
      return std::find(shard.sets.begin(), shard.sets.end(), set) != shard.sets.end();
    });
    if (!holds) continue;
    if (sequence->started) {
      sequence->damaged = true;
    } else {
      GiveBackDamaged(*sequence, set);
    }
  }
  index_.Discard(set);
  return false;
}

// Of a shard without a window nothing counts behind a block that is missing.
void SequenceTable::GiveBackDamaged(SequenceState& sequence, BlockSetId set) {
  for (ShardState& shard : sequence.shards) {
    const auto at = std::find(shard.sets.begin(), shard.sets.end(), set);
    if (at == shard.sets.end()) continue;
    const bool windowed = table_.softmax(shard.shard.group).window > 0;
    const auto end = windowed ? at + 1 : shard.sets.end();
    for (auto lost = at; lost != end; ++lost) {
      Drop(*lost);
      *lost = kNoBlockSet;
    }
    while (!shard.sets.empty() && shard.sets.back() == kNoBlockSet) shard.sets.pop_back();
  }
}

void SequenceTable::OfferAgain(SequenceState& sequence) {
  sequence.resumable = Resumable(sequence.shards, sequence.hashes.size());
}

bool SequenceTable::IsInPlace(const SequenceState& sequence, const ShardState& shard, size_t index) const {
  const BlockSetId set = shard.sets[index];
  const size_t block = index + static_cast<size_t>(shard.first_block());
  const std::optional<PrefixKey> key = index_.KeyOf(set);
  return !key || block >= sequence.hashes.size() || *key == KeyOf(shard.shard, sequence.hashes[block]);
}

bool SequenceTable::CheckHeld(SequenceState& sequence) const {
  for (const ShardState& shard : sequence.shards)
    sequence.damaged = sequence.damaged || !std::all_of(shard.sets.begin(), shard.sets.end(), [&](BlockSetId set) {
                         return set == kNoBlockSet || pool_.Holds(set);
                       });
  return !sequence.damaged;
}

bool SequenceTable::CheckPlaces(SequenceState& sequence) const {
  for (const ShardState& shard : sequence.shards)
    for (size_t i = 0; i < shard.sets.size() && !sequence.damaged; ++i)
      sequence.damaged = !IsInPlace(sequence, shard, i);
  return !sequence.damaged;
}

}  // namespace dovetail::attention
