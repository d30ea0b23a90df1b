#include "tests/attention_worker/sequence_model.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/attention_worker/sequence_fixture.h"

namespace dovetail::attention::testing {
namespace {

constexpr int kMaxOpen = 8;
constexpr uint64_t kGarbage = ~uint64_t{0};

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x7f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 27);
}

}  // namespace

ModelledTable::ModelledTable(const proto::AttentionTable& table, uint32_t blocks, uint64_t seed)
    : table_(table),
      sequences_(table_, blocks),
      random_(seed),
      blocks_(blocks, std::vector<Content>(kSegmentTokens, kGarbage)) {}

ModelledTable::Content ModelledTable::ContentAt(const Modelled& sequence, Position position) const {
  Content content = Mix(sequence.salt, 1);
  for (Position at = 0; at <= position; ++at)
    content = Mix(content, static_cast<uint64_t>(sequence.tokens[static_cast<size_t>(at)]));
  return content;
}

std::vector<proto::BlockHash> ModelledTable::HashesOf(const Modelled& sequence, int64_t first, int64_t end) const {
  std::vector<proto::BlockHash> hashes;
  for (int64_t block = first; block < end; ++block)
    hashes.push_back({ContentAt(sequence, block * kSegmentTokens + 63), 7});
  return hashes;
}

// Few layouts, so that sequences meet others of the same.
std::vector<proto::Shard> ModelledTable::RandomShards() {
  switch (random_() % 4) {
    case 0: return WholeShards(table_);
    case 1: return {ShardOf(0, {0, 1}), ShardOf(0, {1, 2}), ShardOf(1, {0, 1})};
    case 2: return {ShardOf(0, {0, 2}, {0, 128}), ShardOf(1, {0, 1})};
    default:
      return {ShardOf(0, {0, 2}, {0, 64}), ShardOf(0, {0, 1}, {128, proto::kOpenEnd}),
              ShardOf(1, {0, 1}, {64, proto::kOpenEnd})};
  }
}

uint64_t ModelledTable::PickSequence() {
  auto it = modelled_.begin();
  std::advance(it, static_cast<std::ptrdiff_t>(random_() % modelled_.size()));
  return it->first;
}

void ModelledTable::RandomOperation() {
  history_.clear();
  const uint64_t dice = random_() % 100;
  if (modelled_.empty() || (dice < 15 && modelled_.size() < kMaxOpen)) {
    Open();
  } else if (dice < 75) {
    Step(/*many=*/dice < 30);
  } else if (dice < 83 && modelled_.size() < kMaxOpen) {
    Fork();
  } else if (dice < 92) {
    Release();
  } else {
    Probe();
  }
  CheckAccounts();
  EXPECT_EQ(sequences_.CheckInvariants(), absl::OkStatus());
}

void ModelledTable::Open() {
  const uint64_t id = random_() % 10 == 0 && !modelled_.empty() ? PickSequence() : next_id_++;
  Modelled sequence;
  sequence.salt = random_() % 2;
  // Prompts share prefixes: a text is its kind, cut somewhere, and sometimes changed once.
  sequence.tokens.resize(1 + random_() % 300);
  const TokenId kind = static_cast<TokenId>(random_() % 2);
  for (size_t i = 0; i < sequence.tokens.size(); ++i) sequence.tokens[i] = kind + static_cast<TokenId>(i % 7);
  if (random_() % 3 == 0) sequence.tokens[random_() % sequence.tokens.size()] = 99;
  const int64_t hashed = random_() % 4 == 0 ? 0 : static_cast<int64_t>(sequence.tokens.size() - 1) / kSegmentTokens;
  const auto shards = RandomShards();
  absl::StrAppend(&history_, "open ", id, " prompt ", sequence.tokens.size(), " hashes ", hashed);
  const auto opened = sequences_.Open({SequenceId(id), shards, HashesOf(sequence, 0, hashed)});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto& offered = (*opened)->resumable;
  ASSERT_TRUE(std::is_sorted(offered.rbegin(), offered.rend()) && offered.back() == 0u);
  ASSERT_LE(offered.front(), hashed);
  const uint32_t start = random_() % 4 == 0 ? offered[random_() % offered.size()] : offered.front();
  sequence.ctx_len = int64_t{start} * kSegmentTokens;
  sequence.named = static_cast<int>(start);
  modelled_[id] = sequence;
}

void ModelledTable::Step(bool many) {
  struct Part {
    uint64_t id;
    Position ctx_len;
    int q_len;
    std::vector<proto::BlockHash> hashes;
  };
  std::vector<Part> parts;
  std::set<uint64_t> chosen;
  for (int i = many ? 3 : 1; i > 0; --i) chosen.insert(PickSequence());
  for (const uint64_t id : chosen) {
    Modelled& sequence = modelled_[id];
    // The step before is repeated, partly taken back (what was written wrongly, always), or taken as it is.
    const int kept = !sequence.good || random_() % 10 == 0 ? 0
                     : random_() % 6 == 0 ? static_cast<int>(random_() % static_cast<uint64_t>(sequence.q_len + 1))
                                          : sequence.q_len;
    Part part{id, sequence.ctx_len + kept, 0, {}};
    const Position prompt_left = static_cast<Position>(sequence.tokens.size()) - part.ctx_len;
    part.q_len = 1 + static_cast<int>(random_() % (prompt_left > 1 ? static_cast<uint64_t>(prompt_left) : 3));
    part.hashes = HashesOf(sequence, random_() % 3 == 0 ? 0 : sequence.named, part.ctx_len / kSegmentTokens);
    absl::StrAppend(&history_, "step ", id, " ctx_len ", part.ctx_len, " q_len ", part.q_len, "; ");
    parts.push_back(std::move(part));
  }
  std::vector<SequenceTable::Growth> growth;
  for (const Part& part : parts) {
    SequenceState* state = sequences_.Find(SequenceId(part.id));
    ASSERT_NE(state, nullptr);
    const absl::Status committed = sequences_.Commit(*state, part.ctx_len, part.hashes);
    ASSERT_TRUE(committed.ok()) << committed;
    Modelled& sequence = modelled_[part.id];
    sequence.started = true;
    sequence.ctx_len = part.ctx_len;
    sequence.q_len = 0;
    sequence.good = true;
    sequence.named = static_cast<int>(part.ctx_len / kSegmentTokens);
    CheckContent(part.id);
    growth.push_back(SequenceTable::Growth::OfStep(*state, part.q_len));
  }
  const int64_t blocks = sequences_.BlocksToAppend(growth);
  const auto before = sequences_.status();
  const bool room = sequences_.MakeRoom(blocks);
  ASSERT_EQ(room, static_cast<int64_t>(before.blocks_total - before.blocks_in_use) >= blocks)
      << "refused only when really full";
  if (!room) return;
  std::vector<BlockCopy> copies;
  for (const SequenceTable::Growth& part : growth) sequences_.Append(part, copies);
  ASSERT_EQ(static_cast<int64_t>(sequences_.status().blocks_in_use),
            static_cast<int64_t>(before.blocks_in_use) + blocks)
      << "a step takes exactly what it asked for";
  for (const BlockCopy& copy : copies) blocks_[copy.to] = blocks_[copy.from];
  for (const Part& part : parts) {
    Modelled& sequence = modelled_[part.id];
    const size_t end = static_cast<size_t>(part.ctx_len + part.q_len);
    sequence.q_len = part.q_len;
    if (sequence.tokens.size() < end) {
      sequence.tokens.resize(static_cast<size_t>(part.ctx_len) + 1);
      while (sequence.tokens.size() < end) sequence.tokens.push_back(static_cast<TokenId>(random_() % 3));
    }
    sequence.good = random_() % 8 != 0;  // else it is cut off while writing
    Write(part.id, part.ctx_len, part.ctx_len + part.q_len, sequence.good);
  }
  for (const auto& [id, sequence] : modelled_)
    if (sequence.started) CheckContent(id);
}

void ModelledTable::Fork() {
  const uint64_t parent = PickSequence();
  const Modelled& sequence = modelled_[parent];
  const Position at = sequence.ctx_len + (sequence.good ? sequence.q_len : 0);
  const uint64_t child = random_() % 6 == 0 ? PickSequence() : next_id_++;
  absl::StrAppend(&history_, "fork ", parent, " to ", child, " at ", at);
  const auto forked = sequences_.Fork({SequenceId(parent), SequenceId(child), at});
  ASSERT_EQ(forked.ok(), sequence.started && child != parent) << forked.status();
  if (!forked.ok()) return;
  Modelled copy = sequence;
  copy.ctx_len = at;
  copy.q_len = 0;
  copy.tokens.resize(std::max<size_t>(static_cast<size_t>(at), 1));
  copy.named = std::min(copy.named, static_cast<int>(at / kSegmentTokens));
  modelled_[child] = copy;
  CheckContent(child);
}

void ModelledTable::Release() {
  const uint64_t id = PickSequence();
  const Modelled& sequence = modelled_[id];
  const Position at = sequence.ctx_len + (sequence.good ? sequence.q_len : 0);
  absl::StrAppend(&history_, "release ", id, " at ", at);
  sequences_.Release(
      {SequenceId(id), at,
       sequence.started ? HashesOf(sequence, sequence.named, at / kSegmentTokens) : std::vector<proto::BlockHash>{}});
  EXPECT_EQ(sequences_.Find(SequenceId(id)), nullptr);
  modelled_.erase(id);
}

void ModelledTable::Probe() {
  if (!pins_.empty() && random_() % 2 == 0) {
    absl::StrAppend(&history_, "unpin ", pins_.back());
    sequences_.Unpin(pins_.back());
    pins_.pop_back();
    return;
  }
  const Modelled& sequence = modelled_[PickSequence()];
  const uint64_t pin = random_() % 3;  // 0: no pin; 1 and 2 are taken again and again
  absl::StrAppend(&history_, "probe with pin ", pin);
  const auto found = sequences_.Probe(
      {pin, RandomShards(), HashesOf(sequence, 0, static_cast<int64_t>(sequence.tokens.size()) / kSegmentTokens)});
  EXPECT_EQ(found.back(), 0u);
  if (pin != 0 && std::find(pins_.begin(), pins_.end(), pin) == pins_.end()) pins_.push_back(pin);
}

void ModelledTable::Write(uint64_t id, Position begin, Position end, bool good) {
  const SequenceState& state = *sequences_.Find(SequenceId(id));
  for (Position at = begin; at < end; ++at) {
    const Content token = good ? ContentAt(modelled_[id], at) : kGarbage;
    for (const ShardState& shard : state.shards) {
      if (at < shard.shard.tokens.begin || at >= shard.shard.tokens.end) continue;
      const BlockSetId set = shard.sets[static_cast<size_t>(at / kSegmentTokens - shard.first_block())];
      ASSERT_NE(set, kNoBlockSet);
      ASSERT_EQ(sequences_.pool().references(set), 1u) << "what is written belongs to one sequence";
      const int group = shard.shard.group.value(), heads = shard.shard.kv_heads.size();
      for (int op = 0; op < table_.ops_in_group[group]; ++op)
        for (int head = 0; head < heads; ++head)
          blocks_[sequences_.pool().blocks(set)[static_cast<size_t>(op * heads + head)]]
                 [static_cast<size_t>(at % kSegmentTokens)] =
                     SlotContent(token, group, op, shard.shard.kv_heads.begin + head);
    }
  }
}

// Whatever a token at ctx_len sees of what lies here is the sequence's own.
void ModelledTable::CheckContent(uint64_t id) {
  const Modelled& sequence = modelled_[id];
  const SequenceState& state = *sequences_.Find(SequenceId(id));
  ASSERT_EQ(state.ctx_len, sequence.ctx_len);
  std::vector<Content> contents;
  Content content = Mix(sequence.salt, 1);
  for (Position at = 0; at < sequence.ctx_len; ++at)
    contents.push_back(content = Mix(content, static_cast<uint64_t>(sequence.tokens[static_cast<size_t>(at)])));
  for (const ShardState& shard : state.shards) {
    const int group = shard.shard.group.value(), heads = shard.shard.kv_heads.size();
    const int window = table_.softmax(shard.shard.group).window;
    const Position first = std::max(shard.shard.tokens.begin, window > 0 ? sequence.ctx_len - window + 1 : 0);
    const Position end = std::min(sequence.ctx_len, shard.shard.tokens.end);
    for (Position at = first; at < end; ++at) {
      const BlockSetId set = shard.sets[static_cast<size_t>(at / kSegmentTokens - shard.first_block())];
      ASSERT_NE(set, kNoBlockSet) << "sequence " << id << " position " << at;
      for (int op = 0; op < table_.ops_in_group[group]; ++op)
        for (int head = 0; head < heads; ++head)
          ASSERT_EQ(blocks_[sequences_.pool().blocks(set)[static_cast<size_t>(op * heads + head)]]
                           [static_cast<size_t>(at % kSegmentTokens)],
                    SlotContent(contents[static_cast<size_t>(at)], group, op, shard.shard.kv_heads.begin + head))
              << "sequence " << id << " position " << at << " group " << group << " op " << op << " head " << head;
    }
    const int64_t left =
        std::min<int64_t>(first / kSegmentTokens - shard.first_block(), static_cast<int64_t>(shard.sets.size()));
    for (int64_t i = 0; window > 0 && i < left; ++i)
      ASSERT_EQ(shard.sets[static_cast<size_t>(i)], kNoBlockSet) << "the window has left it";
  }
}

void ModelledTable::CheckAccounts() {
  std::map<BlockSetId, uint32_t> holders;
  for (const auto& [id, unused] : modelled_)
    for (const ShardState& shard : sequences_.Find(SequenceId(id))->shards)
      for (const BlockSetId set : shard.sets)
        if (set != kNoBlockSet) ++holders[set];
  uint64_t held = 0;
  std::set<KvBlockId> seen;
  for (const auto& [set, count] : holders) {
    held += sequences_.pool().blocks(set).size();
    ASSERT_GE(sequences_.pool().references(set), count);
    ASSERT_TRUE(!pins_.empty() || sequences_.pool().references(set) == count) << "a reference leaked";
    for (const KvBlockId block : sequences_.pool().blocks(set))
      ASSERT_TRUE(seen.insert(block).second) << "block " << block << " is in two sets";
  }
  const auto status = sequences_.status();
  ASSERT_EQ(status.sequences, modelled_.size());
  ASSERT_GE(status.blocks_in_use, held);
  ASSERT_TRUE(!pins_.empty() || status.blocks_in_use == held) << "blocks leaked";
  ASSERT_EQ(status.blocks_in_use + status.blocks_cached + sequences_.pool().free_blocks(), status.blocks_total);
}

void ModelledTable::ReleaseAll() {
  while (!modelled_.empty()) Release();
  for (const uint64_t pin : pins_) sequences_.Unpin(pin);
  pins_.clear();
  CheckAccounts();
  EXPECT_EQ(sequences_.status().blocks_in_use, 0u);
  EXPECT_TRUE(sequences_.MakeRoom(static_cast<int64_t>(blocks_.size()))) << "everything can be had again";
  EXPECT_EQ(sequences_.pool().free_blocks(), blocks_.size());
}

}  // namespace dovetail::attention::testing
