#include <gtest/gtest.h>

#include <algorithm>

#include "attention_worker/core/sequence_table.h"

// What a hybrid's sequence holds on an attention worker: a state group of 3 KvBlocks a head beside a softmax group.

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
    const SequenceTable::Growth growth{&sequence, q_len};
    ASSERT_TRUE(sequences_.MakeRoom(sequences_.BlocksToAppend({&growth, 1})));
    std::vector<BlockCopy> copies;
    sequences_.Append(sequence, q_len, copies);
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

INSTANTIATE_TEST_SUITE_P(Models, LinearSequence, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Hybrid" : "StatesOnly"; });

}  // namespace
}  // namespace dovetail::attention
