#include "tests/scheduler/fake_workers.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::scheduler {

void FakeAttentionWorker::Complain(SequenceId sequence, const std::string& what) {
  complaints_.push_back(absl::StrCat("attention worker ", id_.value(), ": sequence ", sequence.value(), ": ", what));
}

void FakeAttentionWorker::CheckGeneration(const Held& held, SequenceId sequence, KvGeneration said, bool heard) {
  if (said == held.generation || (!heard && said == KvGeneration(0))) return;
  Complain(sequence, absl::StrCat("named as generation ", said.value(), ", but it is ", held.generation.value()));
}

int64_t FakeAttentionWorker::FirstVisible(const proto::Shard& shard, Position ctx_len) const {
  const int window = table_->softmax(shard.group).window;
  const int64_t visible = window == 0 ? 0 : std::max<Position>(0, ctx_len + 1 - window) / kSegmentTokens;
  return std::max(visible, shard.tokens.begin / kSegmentTokens);
}

std::vector<uint32_t> FakeAttentionWorker::Probe(const std::vector<proto::Shard>& shards,
                                                 const std::vector<proto::BlockHash>& hashes) const {
  std::vector<uint32_t> resumable;
  for (uint32_t count = static_cast<uint32_t>(hashes.size()); count > 0; --count) {
    bool all = true;
    for (const proto::Shard& shard : shards) {
      const int64_t end = std::min<Position>(shard.tokens.end, Position{count} * kSegmentTokens) / kSegmentTokens;
      for (int64_t block = FirstVisible(shard, Position{count} * kSegmentTokens); block < end && all; ++block) {
        all = cache_.contains(KeyOf(hashes[block], shard));
      }
    }
    if (all) resumable.push_back(count);
  }
  resumable.push_back(0);
  return resumable;
}

bool FakeAttentionWorker::Refuses(SequenceId sequence) {
  if (refuse == 0) return false;
  --refuse;
  refused_.insert(sequence);
  return true;
}

proto::SequenceOpened FakeAttentionWorker::Open(const proto::OpenSequence& message) {
  if (Refuses(message.sequence)) return {.sequence = message.sequence, .resumable = {}};
  if (sequences_.contains(message.sequence) != message.extend)
    Complain(message.sequence, "opened twice, or extended unopened");
  Held held;
  if (message.extend) held = sequences_[message.sequence];
  held.fill_shard = held.shards.size();
  for (const proto::Shard& shard : message.shards) {
    if (shard.worker != id_ || shard.epoch != epoch_) Complain(message.sequence, "was given another worker's shard");
    HeldShard& added = held.shards.emplace_back();
    added.shard = shard;
    for (size_t block = 0; block < message.hashes.size(); ++block) {  // taken over at once
      const auto cached = cache_.find(KeyOf(message.hashes[block], shard));
      const Position begin = static_cast<Position>(block) * kSegmentTokens;
      if (cached == cache_.end() || begin < shard.tokens.begin || begin >= shard.tokens.end) continue;
      added.blocks[static_cast<int64_t>(block)] = std::make_shared<Block>(Block{cached->second});
    }
  }
  held.resumable = Probe(message.shards, message.hashes);
  held.offered = message.hashes;
  if (!message.extend) held.generation = KvGeneration(++openings_);
  const proto::SequenceOpened opened{message.sequence, held.resumable, held.generation};
  sequences_[message.sequence] = std::move(held);
  return opened;
}

bool FakeAttentionWorker::TakeFrom(const FakeAttentionWorker& giver, const proto::MoveSequence& message) {
  const auto at = sequences_.find(message.sequence);
  const auto from = giver.sequences_.find(message.sequence);
  if (at == sequences_.end() || from == giver.sequences_.end()) return false;
  Held& held = at->second;
  const Held& given = from->second;
  CheckGeneration(given, message.sequence, message.generation);
  CheckGeneration(held, message.sequence, message.target_generation);
  const auto& starts = given.resumable;
  const bool begins = !given.stepped && message.end % kSegmentTokens == 0 &&
                      std::find(starts.begin(), starts.end(), message.end / kSegmentTokens) != starts.end();
  if (!begins && message.end != given.ctx_len && message.end != given.end)
    Complain(message.sequence, "moved where it does not stand");
  if (given.shards.size() != held.shards.size() - held.fill_shard)
    Complain(message.sequence, "moves other shards than it has");
  for (size_t i = 0; i < given.shards.size() && held.fill_shard + i < held.shards.size(); ++i) {
    HeldShard& to = held.shards[held.fill_shard + i];
    const HeldShard& source = given.shards[i];
    if (source.shard.group != to.shard.group || !(source.shard.kv_heads == to.shard.kv_heads) ||
        !(source.shard.tokens == to.shard.tokens)) {
      Complain(message.sequence, "moves to a shard unlike its own");
    }
    std::erase_if(to.blocks, [&](const auto& block) {
      return block.first * kSegmentTokens >= message.begin || block.first < FirstVisible(to.shard, message.end);
    });
    for (const auto& [index, block] : source.blocks) {
      const Position begin = index * kSegmentTokens;
      if (begin < message.begin || begin >= message.end || index < FirstVisible(to.shard, message.end)) continue;
      auto copy = std::make_shared<Block>(*block);
      copy->tokens.resize(std::min<size_t>(copy->tokens.size(), message.end - begin));
      to.blocks[index] = std::move(copy);
    }
  }
  if (held.fill_shard == 0) {
    held.stepped = held.filled = true;
    held.ctx_len = held.end = held.written = message.end;
    held.named = static_cast<int64_t>(held.offered.size());
  }
  Recount(held);
  return true;
}

proto::SequenceOpened FakeAttentionWorker::Fork(const proto::ForkSequence& message) {
  if (Refuses(message.child)) return {.sequence = message.child, .resumable = {}};
  const auto parent = sequences_.find(message.parent);
  if (parent == sequences_.end()) {
    Complain(message.parent, "forked, but unknown");
    return {.sequence = message.child, .resumable = {0}};
  }
  CheckGeneration(parent->second, message.parent, message.generation);
  if (sequences_.contains(message.child)) Complain(message.child, "forked twice");
  if (!parent->second.stepped || message.ctx_len != parent->second.end) {
    Complain(message.parent, absl::StrCat("forked at ", message.ctx_len, ", but its end is ", parent->second.end));
  }
  Held child = parent->second;
  child.ctx_len = child.end = child.written = message.ctx_len;
  for (HeldShard& held : child.shards) {
    if (message.ctx_len % kSegmentTokens == 0) continue;
    const auto open = held.blocks.find(message.ctx_len / kSegmentTokens);
    if (open != held.blocks.end()) open->second = std::make_shared<Block>(*open->second);
  }
  blocks_at_most_ += child.blocks;
  child.generation = KvGeneration(++openings_);
  const proto::SequenceOpened opened{
      message.child, {static_cast<uint32_t>(message.ctx_len / kSegmentTokens), 0}, child.generation};
  sequences_[message.child] = std::move(child);
  return opened;
}

void FakeAttentionWorker::Name(Held& held, Position ctx_len, const std::vector<proto::BlockHash>& hashes, bool exact) {
  if (!caching_) {
    if (!hashes.empty()) complaints_.push_back("block hashes without a prefix cache");
    return;
  }
  const int64_t complete = ctx_len / kSegmentTokens;
  const int64_t first = complete - static_cast<int64_t>(hashes.size());
  if (first < 0 || first > held.named || (exact && !hashes.empty() && complete < held.named)) {
    complaints_.push_back(absl::StrCat("attention worker ", id_.value(), ": ", hashes.size(), " block hashes at ",
                                       ctx_len, " do not follow ", held.named));
    return;
  }
  held.named = std::max(held.named, complete);
  for (size_t i = 0; i < hashes.size(); ++i) {
    const int64_t block = first + static_cast<int64_t>(i);
    for (HeldShard& shard : held.shards) {
      const auto at = shard.blocks.find(block);
      if (at == shard.blocks.end()) continue;  // not its tokens, or out of its window
      const auto [cached, is_new] = cache_.emplace(KeyOf(hashes[i], shard.shard), at->second->tokens);
      if (!is_new && cached->second != at->second->tokens) complaints_.push_back("one hash names two contents");
      if (at->second->tokens.size() != kSegmentTokens) complaints_.push_back("an incomplete block was named");
    }
  }
}

// What a move brought is found by the names that the sequence was opened with, from its first step on, or when it is
// released with all of it.
void FakeAttentionWorker::NameFilled(Held& held, Position ctx_len) {
  if (!std::exchange(held.filled, false) || !caching_ || ctx_len != held.ctx_len) return;
  for (HeldShard& shard : held.shards)
    for (const auto& [index, block] : shard.blocks)
      if (index < static_cast<int64_t>(held.offered.size()) && block->tokens.size() == kSegmentTokens)
        cache_.emplace(KeyOf(held.offered[index], shard.shard), block->tokens);
}

// A sequence moved here whose blocks the cache had all is there without a step, which may be lost before it comes.
bool FakeAttentionWorker::WasOffered(const Held& held, const proto::ReleaseSequence& message) {
  const uint32_t complete = static_cast<uint32_t>(message.ctx_len / kSegmentTokens);
  return std::find(held.resumable.begin(), held.resumable.end(), complete) != held.resumable.end() &&
         message.hashes.size() <= complete &&
         std::equal(message.hashes.begin(), message.hashes.end(),
                    held.offered.begin() + (complete - message.hashes.size()));
}

void FakeAttentionWorker::Release(const proto::ReleaseSequence& message) {
  const auto at = sequences_.find(message.sequence);
  if (refused_.erase(message.sequence) > 0) return;
  if (at == sequences_.end()) return Complain(message.sequence, "released, but unknown");
  Held& held = at->second;
  CheckGeneration(held, message.sequence, message.generation, /*heard=*/false);
  if (held.stepped) {
    if (message.ctx_len != 0 && message.ctx_len != held.ctx_len && message.ctx_len != held.end) {
      Complain(message.sequence,
               absl::StrCat("released at ", message.ctx_len, ", but it is at ", held.ctx_len, "..", held.end));
    }
    NameFilled(held, message.ctx_len);
    Name(held, message.ctx_len, message.hashes, false);
  } else if (!message.hashes.empty() && !WasOffered(held, message)) {
    Complain(message.sequence, "released with hashes of blocks that were never computed");
  }
  blocks_at_most_ -= held.blocks;
  sequences_.erase(at);
}

void FakeAttentionWorker::Append(HeldShard& held, Position position, TokenId token) {
  auto& block = held.blocks[position / kSegmentTokens];
  if (block == nullptr) block = std::make_shared<Block>();
  if (block.use_count() > 1) block = std::make_shared<Block>(*block);
  const size_t offset = static_cast<size_t>(position % kSegmentTokens);
  if (block->tokens.size() < offset) complaints_.push_back(absl::StrCat("a hole before position ", position));
  block->tokens.resize(offset);
  block->tokens.push_back(token);
}

void FakeAttentionWorker::Step(const proto::StepEntry& entry, const proto::PrefillPart& part) {
  const auto at = sequences_.find(entry.sequence);
  if (at == sequences_.end()) return Complain(entry.sequence, "in a step, but not open");
  Held& held = at->second;
  CheckGeneration(held, entry.sequence, proto::GenerationAt(entry.placement, id_));
  const Position ctx_len = entry.ctx_len;
  const Position end = ctx_len + static_cast<Position>(entry.tokens.size());
  if (part.rank > 0) {
    if (held.group != part.group || held.written != ctx_len) Complain(entry.sequence, "a rank before is missing");
    for (HeldShard& shard : held.shards) AppendTokens(shard, entry);
    held.written = end;
    Recount(held);
    return CheckRoom(entry.sequence);
  }
  if (!held.stepped) {
    const bool offered = ctx_len % kSegmentTokens == 0 && std::find(held.resumable.begin(), held.resumable.end(),
                                                                    ctx_len / kSegmentTokens) != held.resumable.end();
    if (!offered) Complain(entry.sequence, absl::StrCat("starts at ", ctx_len, ", which was not offered"));
    held.named = ctx_len / kSegmentTokens;
  } else if (ctx_len != held.ctx_len && (ctx_len != held.end || held.written != held.end)) {
    Complain(entry.sequence, absl::StrCat("goes on at ", ctx_len, ", but it is at ", held.ctx_len, "..", held.end));
  }
  NameFilled(held, ctx_len);
  Name(held, ctx_len, entry.block_hashes, true);
  for (HeldShard& shard : held.shards) {
    std::erase_if(shard.blocks, [&](const auto& block) {
      return block.first < FirstVisible(shard.shard, ctx_len) ||
             block.first * kSegmentTokens >= std::max<Position>(ctx_len, 1);
    });
    AppendTokens(shard, entry);
  }
  held.stepped = true;
  held.ctx_len = ctx_len;
  held.group = part.group;
  held.written = end;
  held.end = part.in_group() ? part.end : end;
  Recount(held);
  CheckRoom(entry.sequence);
}

void FakeAttentionWorker::AppendTokens(HeldShard& held, const proto::StepEntry& entry) {
  const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
  for (Position position = entry.ctx_len; position < end; ++position)
    if (position >= held.shard.tokens.begin && position < held.shard.tokens.end)
      Append(held, position, entry.tokens[position - entry.ctx_len]);
}

void FakeAttentionWorker::CheckRoom(SequenceId sequence) {
  if (blocks_at_most_ > capacity_ && blocks_in_use() > capacity_)
    Complain(sequence, absl::StrCat("exceeds the ", capacity_, " blocks that there are"));
}

TokenId FakeAttentionWorker::Read(SequenceId sequence, LayerGroup group, int kv_head, Position position) const {
  const auto at = sequences_.find(sequence);
  if (at == sequences_.end()) return -1;
  for (const HeldShard& held : at->second.shards) {
    const proto::Shard& shard = held.shard;
    if (shard.group != group || kv_head < shard.kv_heads.begin || kv_head >= shard.kv_heads.end) continue;
    const auto block = held.blocks.find(position / kSegmentTokens);
    if (position < shard.tokens.begin || position >= shard.tokens.end || block == held.blocks.end()) continue;
    const size_t offset = static_cast<size_t>(position % kSegmentTokens);
    if (offset < block->second->tokens.size()) return block->second->tokens[offset];
  }
  return -1;
}

void FakeAttentionWorker::EvictSome(uint64_t random) {
  if (cache_.empty()) return;
  auto victim = cache_.begin();
  std::advance(victim, random % cache_.size());
  cache_.erase(victim);
}

uint64_t FakeAttentionWorker::BlocksPerIndex(const proto::Shard& shard) const {
  return static_cast<uint64_t>(shard.kv_heads.size()) * table_->ops_in_group[shard.group.value()];
}

void FakeAttentionWorker::Recount(Held& held) {
  blocks_at_most_ -= held.blocks;
  held.blocks = 0;
  for (const HeldShard& shard : held.shards) held.blocks += BlocksPerIndex(shard.shard) * shard.blocks.size();
  blocks_at_most_ += held.blocks;
}

uint64_t FakeAttentionWorker::blocks_in_use() const {
  std::set<const Block*> counted;
  uint64_t blocks = 0;
  for (const auto& [id, held] : sequences_) {
    if (!held.stepped) continue;  // what is taken over from the cache is counted when it is used
    for (const HeldShard& shard : held.shards) {
      const uint64_t each = BlocksPerIndex(shard.shard);
      for (const auto& [index, block] : shard.blocks) blocks += counted.insert(block.get()).second ? each : 0;
    }
  }
  return blocks;
}

}  // namespace dovetail::scheduler
