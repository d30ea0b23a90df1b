#include "attention_worker/core/sequence_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace dovetail::attention {

SequenceTable::SequenceTable(const proto::AttentionTable& table, uint32_t capacity_blocks, uint32_t snapshot_blocks,
                             Digests digests)
    : table_(table), digests_(digests), pool_(capacity_blocks), index_(pool_, snapshot_blocks) {}

PrefixKey SequenceTable::KeyOf(const proto::Shard& shard, const proto::BlockHash& hash) const {
  return PrefixKey{hash, shard.group.value(), static_cast<uint16_t>(shard.kv_heads.begin),
                   static_cast<uint16_t>(shard.kv_heads.end)};
}

uint32_t SequenceTable::BlocksPerSet(const proto::Shard& shard) const {
  return static_cast<uint32_t>(table_.ops_in_group[shard.group.value()] * shard.kv_heads.size() *
                               table_.softmax(shard.group).blocks_per_head);
}

int64_t SequenceTable::FirstVisibleBlock(const proto::Shard& shard, Position position) const {
  const int window = table_.softmax(shard.group).window;
  if (window == 0) return 0;
  return std::max<Position>(0, position - window + 1) / kSegmentTokens;
}

absl::Status SequenceTable::ValidateShards(const std::vector<proto::Shard>& shards) const {
  if (shards.empty()) return InvalidArgument("shards: this worker is given none");
  for (const proto::Shard& shard : shards) {
    if (shard.group.value() >= table_.group_count())
      return InvalidArgument(DebugString(shard), ": the model has ", table_.group_count(), " layer groups");
    if (shard.kv_heads.end > table_.softmax(shard.group).kv_heads)
      return InvalidArgument(DebugString(shard), ": the group has ", table_.softmax(shard.group).kv_heads, " KV heads");
    if (table_.linear(shard.group) != nullptr && !shard.tokens.whole())
      return InvalidArgument(DebugString(shard), ": a linear state is of all tokens");
  }
  return absl::OkStatus();
}

// A full-attention shard stops at the first block that is missing; a windowed one can do without early blocks.
std::vector<BlockSetId> SequenceTable::FindCached(const proto::Shard& shard,
                                                  const std::vector<proto::BlockHash>& hashes) {
  std::vector<BlockSetId> sets;
  const int64_t first = shard.tokens.begin / kSegmentTokens;
  const int64_t last = std::min<int64_t>(hashes.size(), shard.tokens.end / kSegmentTokens);
  const bool windowed = table_.softmax(shard.group).window > 0;
  for (int64_t block = first; block < last; ++block) {
    const BlockSetId set = index_.Find(KeyOf(shard, hashes[block]));
    if (set == kNoBlockSet && !windowed) break;
    sets.push_back(set);
  }
  while (!sets.empty() && sets.back() == kNoBlockSet) sets.pop_back();
  return sets;
}

std::vector<uint32_t> SequenceTable::Resumable(const std::vector<ShardState>& shards, size_t blocks) const {
  std::vector<bool> possible(blocks + 1, true);
  for (const ShardState& state : shards) {
    const int64_t held = static_cast<int64_t>(state.sets.size());
    int64_t run_begin = 0;  // sets[run_begin .. to) are all there
    int64_t to = 0;
    for (int64_t count = 1; count <= static_cast<int64_t>(blocks); ++count) {
      const int64_t end = std::min<int64_t>(count, state.shard.tokens.end / kSegmentTokens) - state.first_block();
      for (; to < std::min(end, held); ++to)
        if (state.sets[to] == kNoBlockSet) run_begin = to + 1;
      const int64_t from = FirstVisibleBlock(state.shard, count * kSegmentTokens) - state.first_block();
      const bool visible_is_held = from >= end || (end <= held && std::max<int64_t>(from, 0) >= run_begin);
      if (end > 0 && !visible_is_held) possible[count] = false;
    }
  }
  std::vector<uint32_t> counts;
  for (size_t count = blocks; count > 0; --count)
    if (possible[count]) counts.push_back(static_cast<uint32_t>(count));
  counts.push_back(0);
  return counts;
}

absl::StatusOr<const SequenceState*> SequenceTable::Open(const proto::OpenSequence& message) {
  DT_RETURN_IF_ERROR(ValidateShards(message.shards));
  if (message.extend) return Extend(message);
  if (sequences_.size() >= kMaxSequences && Find(message.sequence) == nullptr)
    return ResourceExhausted("sequence ", message.sequence.value(), ": ", kMaxSequences, " sequences are open");
  Release(proto::ReleaseSequence{message.sequence, 0, {}});
  auto sequence = std::make_unique<SequenceState>();
  sequence->id = message.sequence;
  sequence->generation = KvGeneration(++openings_);
  sequence->hashes = message.hashes;
  sequence->prompt_blocks = static_cast<int64_t>(message.hashes.size());
  for (const proto::Shard& shard : message.shards) {
    sequence->shards.push_back(ShardState{shard, FindCached(shard, message.hashes)});
    for (const BlockSetId set : sequence->shards.back().sets)
      if (set != kNoBlockSet) index_.Acquire(set);
  }
  sequence->resumable = Resumable(sequence->shards, message.hashes.size());
  const SequenceState* opened = sequence.get();
  sequences_[message.sequence] = std::move(sequence);
  return opened;
}

absl::StatusOr<const SequenceState*> SequenceTable::Extend(const proto::OpenSequence& message) {
  SequenceState* sequence = Find(message.sequence);
  if (sequence == nullptr) return NotFound("extend: sequence ", message.sequence.value(), " is not open here");
  for (const proto::Shard& shard : message.shards)
    for (const ShardState& held : sequence->shards)
      if (held.shard == shard) return InvalidArgument(DebugString(shard), ": the sequence has it already");
  DT_RETURN_IF_ERROR(Commit(*sequence, message.ctx_len, message.hashes));
  std::vector<ShardState> added;
  for (const proto::Shard& shard : message.shards) {
    added.push_back(ShardState{shard, FindCached(shard, message.hashes)});
    for (const BlockSetId set : added.back().sets)
      if (set != kNoBlockSet) index_.Acquire(set);
  }
  sequence->resumable = Resumable(added, message.hashes.size());
  sequence->fill_shard = sequence->shards.size();
  sequence->filled = SequenceState::kNotFilled;
  sequence->indexed_blocks = 0;  // the new shards' blocks are to be found, too
  for (ShardState& shard : added) sequence->shards.push_back(std::move(shard));
  return sequence;
}

absl::Status SequenceTable::CheckFill(const SequenceState& sequence, const Part& part) const {
  const bool extended = sequence.fill_shard > 0;
  const bool ends_here = !extended || part.move_end == sequence.end();
  const bool first = sequence.filled == SequenceState::kNotFilled;
  const bool continues =
      first ? Offers(sequence, part.begin) && (extended || !sequence.started) : part.begin == sequence.filled;
  // A part that follows another goes to blocks of its own, behind all that came before it.
  const bool fits = part.begin % kSegmentTokens == 0 &&
                    std::all_of(sequence.shards.begin() + static_cast<ptrdiff_t>(sequence.fill_shard),
                                sequence.shards.end(), [&](const ShardState& shard) {
                                  const int64_t before = BlocksHolding(shard, 0, part.begin).last;
                                  return before <= static_cast<int64_t>(shard.sets.size());
                                });
  if (part.begin >= part.end || part.end > part.move_end || !ends_here || part.move_end > kMaxPositions || !continues ||
      !fits)
    return InvalidArgument("sequence ", sequence.id.value(), ": a move of tokens ", part.begin, "..", part.end, " of ",
                           part.move_end, " does not continue what is here");
  return absl::OkStatus();
}

Position SequenceTable::FillBegin(const proto::Shard& shard, const Part& part) const {
  return std::clamp(FirstVisibleBlock(shard, part.move_end) * kSegmentTokens, part.begin, part.end);
}

int64_t SequenceTable::BlocksToFill(const SequenceState& sequence, const Part& part) const {
  int64_t blocks = 0;
  for (size_t s = sequence.fill_shard; s < sequence.shards.size(); ++s) {
    const ShardState& shard = sequence.shards[s];
    const BlockRange range = BlocksHolding(shard, FillBegin(shard.shard, part), part.end);
    blocks += (range.last - range.first) * BlocksPerSet(shard.shard);
  }
  return blocks;
}

void SequenceTable::Fill(SequenceState& sequence, const Part& part) {
  for (size_t s = sequence.fill_shard; s < sequence.shards.size(); ++s) {
    ShardState& shard = sequence.shards[s];
    // Cached sets beyond the agreed start go back: what comes is written to sets of its own.
    const size_t keep = BlocksHolding(shard, 0, part.begin).last;
    Truncate(shard, keep);
    const BlockRange range = BlocksHolding(shard, FillBegin(shard.shard, part), part.end);
    if (static_cast<int64_t>(shard.sets.size()) < range.last) shard.sets.resize(range.last, kNoBlockSet);
    for (int64_t i = range.first; i < range.last; ++i) {
      shard.sets[i] = pool_.Allocate(BlocksPerSet(shard.shard));
      DT_CHECK(shard.sets[i] != kNoBlockSet, "room was made for this");
    }
    DropLeftByWindow(shard, part.move_end);  // of the cache; the sequence goes on behind the move
  }
  sequence.filled = part.end;
  sequence.filling = true;
  sequence.arrived = SequenceState::kNotFilled;
  if (sequence.fill_shard > 0) return;
  sequence.started = true;  // the next StepBegin stands at the end of the last part
  sequence.ctx_len = part.begin;
  sequence.q_len = static_cast<int>(part.end - part.begin);
}

absl::StatusOr<const SequenceState*> SequenceTable::Fork(const proto::ForkSequence& message) {
  SequenceState* parent = Find(message.parent);
  if (parent == nullptr) return NotFound("fork: sequence ", message.parent.value(), " is not open here");
  if (!Speaks(*parent, message.generation))
    return FailedPrecondition("fork: sequence ", message.parent.value(), " is of generation ",
                              parent->generation.value(), " here, not of ", message.generation.value());
  if (!CheckHeld(*parent)) return DataLoss("fork: sequence ", message.parent.value(), " is damaged");
  const bool begun = parent->started || message.ctx_len > 0;
  if (!begun || message.ctx_len < parent->ctx_len || LacksTokens(*parent, parent->end(), message.ctx_len))
    return InvalidArgument("fork: ctx_len ", message.ctx_len, ": sequence ", message.parent.value(), " holds ",
                           parent->ctx_len, " to ", parent->end(), " tokens");
  if (message.child == message.parent)
    return InvalidArgument("fork: sequence ", message.child.value(), " is its own child");
  if (sequences_.size() >= kMaxSequences)
    return ResourceExhausted("sequence ", message.child.value(), ": ", kMaxSequences, " sequences are open");
  Release(proto::ReleaseSequence{message.child, 0, {}});
  auto child = std::make_unique<SequenceState>(*parent);
  child->id = message.child;
  child->generation = KvGeneration(++openings_);
  child->started = true;
  child->q_len = 0;
  child->micro_batches = 0;
  child->joint = JointAppend();
  child->fill_shard = 0;
  child->filled = SequenceState::kNotFilled;
  child->ctx_len = message.ctx_len;
  // What the parent was going to hold beyond the fork names nothing here.
  child->hashes.resize(std::min<size_t>(child->hashes.size(), message.ctx_len / kSegmentTokens));
  child->indexed_blocks = std::min(child->indexed_blocks, message.ctx_len / kSegmentTokens);
  for (ShardState& shard : child->shards) {
    const BlockRange held = BlocksHolding(shard, 0, message.ctx_len);
    shard.sets.resize(std::min<size_t>(shard.sets.size(), held.last));
    shard.left_by_window = std::min<int64_t>(shard.left_by_window, shard.sets.size());
    for (const BlockSetId set : shard.sets)
      if (set != kNoBlockSet) index_.Acquire(set);
    DropLeftByWindow(shard, message.ctx_len);
  }
  const SequenceState* opened = child.get();
  sequences_[message.child] = std::move(child);
  return opened;
}

void SequenceTable::ReleaseSets(SequenceState& sequence) {
  // Later blocks go first, so that eviction takes the end of a prefix before its beginning.
  for (ShardState& shard : sequence.shards)
    for (auto set = shard.sets.rbegin(); set != shard.sets.rend(); ++set) Drop(*set);
}

void SequenceTable::Drop(BlockSetId set) {
  if (pool_.Holds(set)) index_.Release(set);
}

void SequenceTable::Release(const proto::ReleaseSequence& message) {
  SequenceState* sequence = Find(message.sequence);
  if (sequence == nullptr || !Speaks(*sequence, message.generation)) return;
  // What a move brought may be found from here on without a step if all of it is there.
  const bool whole = !sequence->filling || (sequence->fill_shard == 0 && sequence->arrived == message.ctx_len);
  const bool sound = sequence->started && whole && CheckHeld(*sequence) && CheckPlaces(*sequence);
  if (sound && CheckCommit(*sequence, message.ctx_len, message.hashes).ok()) {
    TakeHashes(*sequence, message.ctx_len, message.hashes);
    sequence->ctx_len = message.ctx_len;
    IndexCommitted(*sequence);
    MarkSnapshotsAt(*sequence, message.ctx_len);
  }
  ReleaseSets(*sequence);
  sequences_.erase(message.sequence);
}

std::vector<uint32_t> SequenceTable::Probe(const proto::PrefixProbe& message) {
  if (!ValidateShards(message.shards).ok()) return {0};
  if (message.pin_id != 0 && pins_.size() >= kMaxPins && !pins_.contains(message.pin_id)) return {0};
  std::vector<ShardState> shards;
  for (const proto::Shard& shard : message.shards)
    shards.push_back(ShardState{shard, FindCached(shard, message.hashes)});
  if (message.pin_id != 0) {
    Unpin(message.pin_id);
    Pin& pin = pins_[message.pin_id];
    for (const ShardState& shard : shards)
      for (const BlockSetId set : shard.sets)
        if (set != kNoBlockSet) {
          index_.Acquire(set);
          pin.sets.push_back(set);
        }
  }
  return Resumable(shards, message.hashes.size());
}

void SequenceTable::Unpin(uint64_t pin_id) {
  const auto it = pins_.find(pin_id);
  if (it == pins_.end()) return;
  for (auto set = it->second.sets.rbegin(); set != it->second.sets.rend(); ++set) Drop(*set);
  pins_.erase(it);
}

SequenceState* SequenceTable::Find(SequenceId id) {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second.get();
}

SequenceTable::BlockRange SequenceTable::BlocksHolding(const ShardState& shard, Position begin, Position end) const {
  begin = std::max(begin, shard.shard.tokens.begin);
  end = std::min(end, shard.shard.tokens.end);
  if (begin >= end) {
    const int64_t at = std::clamp<Position>(end, shard.shard.tokens.begin, shard.shard.tokens.end) / kSegmentTokens -
                       shard.first_block();
    return {at, at};
  }
  return {begin / kSegmentTokens - shard.first_block(),
          (end + kSegmentTokens - 1) / kSegmentTokens - shard.first_block()};
}

void SequenceTable::IndexCommitted(SequenceState& sequence) {
  while ((sequence.indexed_blocks + 1) * kSegmentTokens <= sequence.ctx_len &&
         sequence.indexed_blocks < static_cast<int64_t>(sequence.hashes.size())) {
    const int64_t block = sequence.indexed_blocks++;
    for (const ShardState& shard : sequence.shards) {
      const int64_t i = block - shard.first_block();
      if (i < 0 || i >= static_cast<int64_t>(shard.sets.size()) || shard.sets[i] == kNoBlockSet) continue;
      const bool state = table_.linear(shard.shard.group) != nullptr;
      const bool findable = index_.Insert(KeyOf(shard.shard, sequence.hashes[block]), shard.sets[i],
                                          state ? PrefixIndex::Content::kSnapshot : PrefixIndex::Content::kTokens);
      if (findable && digests_ == Digests::kOfFinishedBlocks) finished_.push_back(shard.sets[i]);
      if (state && block + 1 == sequence.prompt_blocks) index_.MarkUseful(shard.sets[i]);
    }
  }
}

// The snapshots from which a sequence goes on at ctx_len.
void SequenceTable::MarkSnapshotsAt(const SequenceState& sequence, Position ctx_len) {
  for (const ShardState& shard : sequence.shards) {
    const int64_t last = ctx_len / kSegmentTokens - 1 - shard.first_block();
    if (table_.linear(shard.shard.group) == nullptr || last < 0 || last >= static_cast<int64_t>(shard.sets.size()))
      continue;
    if (shard.sets[last] != kNoBlockSet) index_.MarkUseful(shard.sets[last]);
  }
}

bool SequenceTable::NamesContinue(const SequenceState& sequence, Position ctx_len,
                                  const std::vector<proto::BlockHash>& hashes) {
  return hashes.empty() || ctx_len / kSegmentTokens <= static_cast<int64_t>(sequence.hashes.size() + hashes.size());
}

absl::Status SequenceTable::CheckHashes(const SequenceState& sequence, Position ctx_len,
                                        const std::vector<proto::BlockHash>& hashes) {
  if (hashes.empty()) return absl::OkStatus();
  const int64_t end = ctx_len / kSegmentTokens;
  const int64_t first = end - static_cast<int64_t>(hashes.size());
  const int64_t known = static_cast<int64_t>(sequence.hashes.size());
  if (first < 0 || !NamesContinue(sequence, ctx_len, hashes))
    return InvalidArgument("sequence ", sequence.id.value(), ": ", hashes.size(), " hashes end at block ", end,
                           " of ctx_len ", ctx_len, "; the first ", known, " are known");
  for (int64_t block = first; block < std::min(end, known); ++block)
    if (sequence.hashes[block] != hashes[block - first])
      return InvalidArgument("sequence ", sequence.id.value(), ": the hash of block ", block,
                             " is not the one given before");
  return absl::OkStatus();
}

void SequenceTable::TakeHashes(SequenceState& sequence, Position ctx_len, const std::vector<proto::BlockHash>& hashes) {
  const int64_t known_of_these =
      static_cast<int64_t>(sequence.hashes.size() + hashes.size()) - ctx_len / kSegmentTokens;
  for (size_t i = std::max<int64_t>(0, known_of_these); i < hashes.size(); ++i) sequence.hashes.push_back(hashes[i]);
}

bool SequenceTable::LacksTokens(const SequenceState& sequence, Position begin, Position end) {
  return std::any_of(sequence.shards.begin(), sequence.shards.end(), [&](const ShardState& shard) {
    return std::max(begin, shard.shard.tokens.begin) < std::min(end, shard.shard.tokens.end);
  });
}

bool SequenceTable::Offers(const SequenceState& sequence, Position begin) {
  const auto& blocks = sequence.resumable;
  return begin % kSegmentTokens == 0 && std::find(blocks.begin(), blocks.end(), begin / kSegmentTokens) != blocks.end();
}

absl::Status SequenceTable::CheckCommit(const SequenceState& sequence, Position ctx_len,
                                        const std::vector<proto::BlockHash>& hashes) const {
  if (!sequence.started) {
    if (!Offers(sequence, ctx_len) && LacksTokens(sequence, 0, ctx_len))
      return InvalidArgument("sequence ", sequence.id.value(), ": ctx_len ", ctx_len,
                             " of its first step is not one that was offered");
  } else if (ctx_len < sequence.ctx_len || LacksTokens(sequence, sequence.end(), ctx_len)) {
    return InvalidArgument("sequence ", sequence.id.value(), ": ctx_len ", ctx_len, " is outside ", sequence.ctx_len,
                           "..", sequence.end());
  }
  if (!HoldsVisible(sequence, ctx_len))
    return InvalidArgument("sequence ", sequence.id.value(), ": tokens before ctx_len ", ctx_len, " are not here");
  return CheckHashes(sequence, ctx_len, hashes);
}

// A shard without a window has no gaps, so only its end is looked at.
bool SequenceTable::HoldsVisible(const SequenceState& sequence, Position ctx_len) const {
  return std::all_of(sequence.shards.begin(), sequence.shards.end(), [&](const ShardState& shard) {
    const BlockRange visible = BlocksHolding(shard, FirstVisibleBlock(shard.shard, ctx_len) * kSegmentTokens, ctx_len);
    if (visible.last > static_cast<int64_t>(shard.sets.size())) return false;
    if (table_.softmax(shard.shard.group).window == 0) return true;
    const auto end = shard.sets.begin() + visible.last;
    return std::find(shard.sets.begin() + visible.first, end, kNoBlockSet) == end;
  });
}

void SequenceTable::Truncate(ShardState& shard, size_t blocks) {
  for (; shard.sets.size() > blocks; shard.sets.pop_back()) Drop(shard.sets.back());
  shard.left_by_window = std::min(shard.left_by_window, static_cast<int64_t>(shard.sets.size()));
}

void SequenceTable::DropLeftByWindow(ShardState& shard, Position ctx_len) {
  const int64_t visible = FirstVisibleBlock(shard.shard, ctx_len) - shard.first_block();
  for (; shard.left_by_window < std::min<int64_t>(visible, shard.sets.size()); ++shard.left_by_window) {
    BlockSetId& set = shard.sets[shard.left_by_window];
    Drop(set);
    set = kNoBlockSet;
  }
}

absl::Status SequenceTable::Commit(SequenceState& sequence, Position ctx_len,
                                   const std::vector<proto::BlockHash>& hashes) {
  DT_RETURN_IF_ERROR(CheckCommit(sequence, ctx_len, hashes));
  if (!sequence.started) {
    sequence.indexed_blocks = ctx_len / kSegmentTokens;
    MarkSnapshotsAt(sequence, ctx_len);
  }
  sequence.started = true;
  sequence.filling = false;
  sequence.fill_shard = 0;  // a move has ended
  sequence.filled = SequenceState::kNotFilled;
  sequence.ctx_len = ctx_len;
  sequence.q_len = 0;
  TakeHashes(sequence, ctx_len, hashes);
  IndexCommitted(sequence);
  for (ShardState& shard : sequence.shards) {
    const size_t keep = BlocksHolding(shard, 0, ctx_len).last;
    Truncate(shard, keep);
    DropLeftByWindow(shard, ctx_len);
  }
  return absl::OkStatus();
}

bool SequenceTable::MustCopy(BlockSetId set) const { return set != kNoBlockSet && pool_.references(set) > 1; }

SequenceTable::BlockRange SequenceTable::BlocksWritten(const Growth& growth, const ShardState& shard) const {
  if (table_.linear(shard.shard.group) != nullptr) return BlocksHolding(shard, growth.state_begin, growth.state_end);
  return BlocksHolding(shard, growth.sequence->ctx_len, growth.sequence->ctx_len + growth.q_len);
}

bool SequenceTable::Keeps(const Growth& growth, const ShardState& shard, int64_t index) const {
  if (!growth.states || table_.linear(shard.shard.group) == nullptr) return true;
  return proto::KeepsStateBlock(shard.first_block() + index, growth.state_begin, growth.state_end);
}

int64_t SequenceTable::BlocksToAppend(std::span<const Growth> step) const {
  int64_t blocks = 0;
  std::vector<BlockSetId> shared;  // once for each sequence of the step that is about to write to it
  for (const Growth& growth : step) {
    for (const ShardState& shard : growth.sequence->shards) {
      const BlockRange range = BlocksWritten(growth, shard);
      for (int64_t i = range.first; i < range.last; ++i) {
        if (!Keeps(growth, shard, i)) continue;
        const BlockSetId set = i < static_cast<int64_t>(shard.sets.size()) ? shard.sets[i] : kNoBlockSet;
        if (set == kNoBlockSet) {
          blocks += BlocksPerSet(shard.shard);
        } else if (MustCopy(set)) {
          shared.push_back(set);
        }
      }
    }
  }
  std::sort(shared.begin(), shared.end());
  for (size_t i = 0; i < shared.size();) {
    const BlockSetId set = shared[i];
    int64_t writers = 0;
    for (; i < shared.size() && shared[i] == set; ++i) ++writers;
    blocks += std::min<int64_t>(writers, pool_.references(set) - 1) * static_cast<int64_t>(pool_.blocks(set).size());
  }
  return blocks;
}

bool SequenceTable::MakeRoom(int64_t blocks) {
  return blocks <= pool_.capacity() && index_.MakeRoom(static_cast<uint32_t>(blocks));
}

void SequenceTable::Append(const Growth& growth, std::vector<BlockCopy>& copies) {
  for (ShardState& shard : growth.sequence->shards) {
    const BlockRange range = BlocksWritten(growth, shard);
    if (static_cast<int64_t>(shard.sets.size()) < range.last) shard.sets.resize(range.last, kNoBlockSet);
    for (int64_t i = range.first; i < range.last; ++i) {
      if (!Keeps(growth, shard, i)) continue;
      BlockSetId& set = shard.sets[i];
      if (set != kNoBlockSet && !MustCopy(set)) {
        // A fork may have committed (and named) tokens that this sequence has taken back and writes anew.
        index_.Forget(set);
        pool_.SetDigest(set, std::nullopt);
        continue;
      }
      const BlockSetId fresh = pool_.Allocate(BlocksPerSet(shard.shard));
      DT_CHECK(fresh != kNoBlockSet, "room was made for this");
      if (set != kNoBlockSet) {
        const auto& from = pool_.blocks(set);
        const auto& to = pool_.blocks(fresh);
        for (size_t b = 0; b < from.size(); ++b) copies.push_back(BlockCopy{from[b], to[b]});
        index_.Release(set);
      }
      set = fresh;
    }
  }
  if (growth.q_len > 0) growth.sequence->q_len = growth.q_len;
}

WorkerStatus SequenceTable::status() const {
  WorkerStatus status;
  status.blocks_total = pool_.capacity();
  status.blocks_cached = index_.evictable_blocks();
  status.blocks_of_snapshots = index_.evictable_snapshot_blocks();
  status.blocks_in_use = pool_.capacity() - pool_.free_blocks() - index_.evictable_blocks();
  status.sequences = sequences_.size();
  return status;
}

}  // namespace dovetail::attention
