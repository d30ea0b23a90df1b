#include <gtest/gtest.h>

#include <algorithm>

#include "attention_worker/core/sequence_table.h"

// What a hybrid's sequence holds on an attention worker: a state group of 3 KvBlocks a head, and a softmax group.

namespace dovetail::attention {
namespace {

constexpr int kHeads = 4, kBlocksPerHead = 3, kKvHeads = 2;

proto::AttentionTable Table(bool with_softmax) {
  proto::LinearSpec state;
  state.heads = kHeads;
  state.key_dim = state.value_dim = 16;
  state.blocks_per_head = kBlocksPerHead;
  proto::LinearConstants decays;
  decays.log_decay.assign(kHeads, -0.1f);
  if (!with_softmax) return *proto::AttentionTable::Build({state}, {decays});
  proto::SoftmaxSpec softmax;
  softmax.query_heads = softmax.kv_heads = kKvHeads;
  softmax.key_dim = softmax.value_dim = 16;
  softmax.scale = 0.25f;
  return *proto::AttentionTable::Build({state, softmax}, {decays, {}});
}

class LinearSequence : public ::testing::TestWithParam<bool> {
 protected:
  LinearSequence() : table_(Table(GetParam())), sequences_(table_, 1 << 17) {
    proto::OpenSequence open;
    open.sequence = SequenceId(1);
    const proto::Placement placement = proto::WholePlacement(table_, WorkerId(0), Epoch(1));
    open.shards.assign(placement.begin(), placement.end());
    EXPECT_TRUE(sequences_.Open(open).ok());
  }

  void Step(Position ctx_len, int q_len) {
    SequenceState& sequence = *sequences_.Find(SequenceId(1));
    ASSERT_TRUE(sequences_.Commit(sequence, ctx_len, {}).ok());
    const auto growth = SequenceTable::Growth::OfStep(sequence, q_len);
    ASSERT_TRUE(sequences_.MakeRoom(sequences_.BlocksToAppend({&growth, 1})));
    std::vector<BlockCopy> copies;
    sequences_.Append(growth, copies);
  }
  int64_t InUse() const { return static_cast<int64_t>(sequences_.status().blocks_in_use); }
  static int64_t KvBlocks(Position tokens) { return GetParam() ? (tokens + 63) / 64 * kKvHeads : 0; }

  const proto::AttentionTable table_;
  SequenceTable sequences_;
};

TEST_P(LinearSequence, HoldsTheSameStateAtAMillionTokensAsAtAThousand) {
  constexpr int kChunk = 512;
  constexpr int64_t kState = kHeads * kBlocksPerHead;
  for (Position ctx = 0; ctx < 1'000'000; ctx += kChunk) {
    Step(ctx, kChunk);
    const int64_t states = InUse() - KvBlocks(ctx + kChunk);
    ASSERT_LE(states, (kChunk / 64 + 1) * kState) << "while a chunk is appended, at " << ctx;
    ASSERT_GE(states, kChunk / 64 * kState);
  }
  Step(1'000'448, 1);
  EXPECT_EQ(InUse() - KvBlocks(1'000'449), 2 * kState);  // the block before, and the one in progress
}

TEST_P(LinearSequence, HasNoStateOfSomeTokens) {
  proto::Shard part = proto::WholePlacement(table_, WorkerId(0), Epoch(1))[0];
  part.tokens.end = 128;
  EXPECT_EQ(sequences_.Open({SequenceId(2), {part}, {}}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(LinearSequence, KeepsTheFormerStateUntilTheNextStepCommits) {
  Step(0, 63);
  Step(63, 2);  // crosses a boundary
  const ShardState& shard = sequences_.Find(SequenceId(1))->shards[0];
  EXPECT_NE(shard.sets[0], kNoBlockSet);
  Step(63, 2);  // the same again: the state before is still there
  EXPECT_NE(shard.sets[0], kNoBlockSet);
  Step(64, 70);  // one of the two was taken back
  EXPECT_NE(shard.sets[0], kNoBlockSet);
  Step(134, 1);
  EXPECT_EQ(shard.sets[0], kNoBlockSet);
  EXPECT_NE(shard.sets[1], kNoBlockSet);
  SequenceState& sequence = *sequences_.Find(SequenceId(1));
  EXPECT_FALSE(sequences_.CheckCommit(sequence, 133, {}).ok()) << "a position before the committed one";
  EXPECT_FALSE(sequences_.CheckCommit(sequence, 136, {}).ok()) << "a position beyond the step";
}

// What a prompt leaves behind: the states after each of its blocks, and the K and V.
class SnapshotsOfSequences : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlocks = 4000, kOfState = kHeads * kBlocksPerHead;
  explicit SnapshotsOfSequences(uint32_t snapshots = 10)
      : table_(Table(true)), sequences_(table_, kBlocks, snapshots * kOfState) {}

  static std::vector<proto::BlockHash> Hashes(uint64_t text, int blocks) {
    std::vector<proto::BlockHash> hashes;
    for (int block = 0; block < blocks; ++block) hashes.push_back({text, static_cast<uint64_t>(block) + 1});
    return hashes;
  }
  // The largest start that is offered.
  uint32_t Open(uint64_t id, const std::vector<proto::BlockHash>& hashes) {
    const proto::Placement placement = proto::WholePlacement(table_, WorkerId(0), Epoch(1));
    const auto opened = sequences_.Open({SequenceId(id), {placement.begin(), placement.end()}, hashes});
    EXPECT_TRUE(opened.ok());
    return (*opened)->resumable.front();
  }
  void Append(uint64_t id, Position ctx_len, int q_len) {
    SequenceState& sequence = *sequences_.Find(SequenceId(id));
    ASSERT_TRUE(sequences_.Commit(sequence, ctx_len, {}).ok());
    const auto growth = SequenceTable::Growth::OfStep(sequence, q_len);
    ASSERT_TRUE(sequences_.MakeRoom(sequences_.BlocksToAppend({&growth, 1})));
    std::vector<BlockCopy> copies;
    sequences_.Append(growth, copies);
  }
  // A request with this prompt, computed 64 tokens a step, and so many tokens of an answer. Returns where it began.
  uint32_t Run(uint64_t id, const std::vector<proto::BlockHash>& prompt, int answer = 1) {
    const uint32_t start = Open(id, prompt);
    const auto end = static_cast<Position>(prompt.size()) * 64;
    for (Position at = int64_t{start} * 64; at < end; at += 64) Append(id, at, 64);
    for (int i = 0; i < answer; ++i) Append(id, end + i, 1);
    sequences_.Release({SequenceId(id), end + answer, {}});
    return start;
  }
  uint32_t Held(const std::vector<proto::BlockHash>& hashes) {
    const proto::Placement placement = proto::WholePlacement(table_, WorkerId(0), Epoch(1));
    return sequences_.Probe({0, {placement.begin(), placement.end()}, hashes}).front();
  }

  const proto::AttentionTable table_;
  SequenceTable sequences_;
};

TEST_F(SnapshotsOfSequences, LetTheSamePromptBeginAtItsEnd) {
  EXPECT_EQ(Run(1, Hashes(7, 5)), 0u);
  EXPECT_EQ(sequences_.status().blocks_of_snapshots, 5 * kOfState);
  EXPECT_EQ(sequences_.status().blocks_in_use, 0u);
  EXPECT_EQ(Run(2, Hashes(7, 5)), 5u);
  EXPECT_EQ(Held(Hashes(8, 5)), 0u) << "another text, model or salt";
}

TEST_F(SnapshotsOfSequences, NeedTheKeysAndValuesBeforeThemAndTheOtherWayRound) {
  Run(1, Hashes(7, 30));
  EXPECT_EQ(sequences_.status().blocks_of_snapshots, 10 * kOfState) << "as many as may be kept";
  EXPECT_EQ(Held(Hashes(7, 30)), 30u);
  EXPECT_EQ(Held(Hashes(7, 20)), 0u) << "K and V of 20 blocks are there, a state after them is not";
}

TEST_F(SnapshotsOfSequences, OfABeginningThatPromptsShareOutlastManyOtherPrompts) {
  const auto shared = [](uint64_t text) {
    std::vector<proto::BlockHash> hashes = Hashes(7, 3);
    for (const proto::BlockHash& hash : Hashes(text, 4)) hashes.push_back(hash);
    return hashes;
  };
  EXPECT_EQ(Run(1, shared(100)), 0u);
  EXPECT_EQ(Run(2, shared(101)), 3u);
  for (uint64_t text = 200; text < 205; ++text) Run(text, Hashes(text, 40));
  EXPECT_EQ(Run(3, shared(102)), 3u);
}

TEST_F(SnapshotsOfSequences, OfAConversationLetItGoOn) {
  Run(1, Hashes(7, 2), /*answer=*/200);  // named as it is committed: here only the prompt is
  EXPECT_EQ(Held(Hashes(7, 5)), 2u) << "the end of the prompt, though 3 blocks were passed since";
}

TEST_F(SnapshotsOfSequences, LeaveAtOnceWhereTheyAreNotWanted) {
  SequenceTable none(table_, kBlocks, 0);
  const proto::Placement placement = proto::WholePlacement(table_, WorkerId(0), Epoch(1));
  const auto opened = none.Open({SequenceId(1), {placement.begin(), placement.end()}, Hashes(7, 2)});
  ASSERT_TRUE(opened.ok());
  for (int step = 0; step < 2; ++step) {
    SequenceState& sequence = *none.Find(SequenceId(1));
    ASSERT_TRUE(none.Commit(sequence, 64 * step, {}).ok());
    std::vector<BlockCopy> copies;
    none.Append(SequenceTable::Growth::OfStep(sequence, 64), copies);
  }
  none.Release({SequenceId(1), 128, {}});
  EXPECT_EQ(none.status().blocks_of_snapshots, 0u);
  EXPECT_EQ(none.status().blocks_cached, 2u * kKvHeads) << "K and V stay";
}

INSTANTIATE_TEST_SUITE_P(Models, LinearSequence, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Hybrid" : "StatesOnly"; });

}  // namespace
}  // namespace dovetail::attention
