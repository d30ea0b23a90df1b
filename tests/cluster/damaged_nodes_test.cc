#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "tests/cluster/node_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// A sequence in the midst of its answer whose KV is not what was written: a block is given to another one under it, a
// bit changes, two blocks are exchanged before a move. The attention worker refuses, the compute worker hands that on,
// the scheduler begins the sequence again, and the client gets the bits that the request has alone.

namespace dovetail::test {
namespace {

using attention::BlockSetId;

constexpr int kPrompt = 200;  // tokens: three whole blocks and more
constexpr int kMaxTokens = 60;

class DamagedNodes : public testing::TestWithParam<bool> {  // of a model with linear states
 protected:
  DamagedNodes()
      : model_(GetParam() ? WriteTinyFolder(TinyGatedDeltaConfig(), 7, TempFolder())
                          : WriteTinyModel({}, TempFolder())) {}

  Stream Alone(const requests::GenerationRequest& request) {
    NodeCluster cluster(model_, {});
    const uint64_t id = cluster.Submit(request);
    EXPECT_TRUE(cluster.UntilFinished(id));
    return cluster.stream(id);
  }

  // A request that has got some tokens, and of which nothing is under way until it is resumed.
  static uint64_t SubmitAndPause(NodeCluster& cluster, const requests::GenerationRequest& request) {
    const uint64_t id = cluster.Submit(request);
    EXPECT_TRUE(cluster.UntilTokens(id, 10));
    cluster.Pause(id);
    cluster.Turns(1000);
    const size_t tokens = cluster.stream(id).tokens.size();
    cluster.Turns(1000);
    EXPECT_EQ(cluster.stream(id).tokens.size(), tokens) << "it is paused";
    EXPECT_LT(tokens, static_cast<size_t>(kMaxTokens));
    return id;
  }

  // The block sets with all K and V of the one sequence that the worker has.
  static std::vector<BlockSetId>& SetsOf(NodeCluster& cluster, int worker) {
    for (uint64_t id = 0; id < 100; ++id)
      if (auto* sequence = cluster.attention(worker).sequences().Find(SequenceId(id)); sequence != nullptr)
        for (attention::ShardState& shard : sequence->shards)
          if (shard.sets.size() > 2 && shard.sets[0] != attention::kNoBlockSet) return shard.sets;
    DT_CHECK(false, "no sequence has K and V");
  }

  void ExpectAsAlone(NodeCluster& cluster, uint64_t id, const requests::GenerationRequest& request) {
    ASSERT_TRUE(cluster.UntilFinished(id)) << cluster.stream(id).tokens.size() << " tokens";
    const Stream expected = Alone(request);
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens, expected.tokens);
    EXPECT_TRUE(cluster.stream(id) == expected) << "bits of logits";
  }

  NodeModel model_;
  const requests::GenerationRequest request_ = NodeRequest(kPrompt, kMaxTokens, 0);
};

TEST_P(DamagedNodes, ABlockThatIsGivenToAnotherSequenceUnderAWriteIsNotWrittenAndTheSequenceBeginsAgain) {
  NodeCluster cluster(model_, {});
  const uint64_t id = SubmitAndPause(cluster, request_);
  // As a fault in the bookkeeping would: the block set is freed into which the sequence's next tokens go.
  const BlockSetId stale = SetsOf(cluster, 0).back();
  attention::BlockPool& pool = cluster.attention(0).sequences().pool();
  pool.DropReference(stale);
  pool.Free(stale);
  const BlockSetId next = BlockSetId{attention::GenerationOf(stale) + 1} << 32 | attention::PlaceOf(stale);
  const auto other = NodeRequest(kPrompt, kMaxTokens, 1);
  const uint64_t other_id = cluster.Submit(other);
  ASSERT_TRUE(cluster.Until([&] { return pool.Holds(next); })) << "the other one has it";
  ASSERT_TRUE(cluster.UntilTokens(other_id, 5));
  cluster.Resume(id);
  ExpectAsAlone(cluster, id, request_);
  ExpectAsAlone(cluster, other_id, other);
  EXPECT_EQ(cluster.stats().damaged, 1u);
  EXPECT_EQ(cluster.attention(0).counters().damaged_sequences, 1u);
  EXPECT_TRUE(cluster.Until([&] { return cluster.BlocksHeld() == 0; })) << cluster.BlocksHeld();
}

TEST_P(DamagedNodes, ABitThatChangesUnderASequenceIsFoundWhenAnotherTakesTheBlock) {
  NodeCluster cluster(model_, {.digests = attention::Digests::kOfFinishedBlocks});
  const uint64_t id = SubmitAndPause(cluster, request_);
  cluster.attention_device(0).FlipBits(256);
  const uint64_t same = cluster.Submit(request_);
  ExpectAsAlone(cluster, same, request_);
  EXPECT_GT(cluster.attention(0).counters().damaged_sets, 0u);
  cluster.Resume(id);
  ExpectAsAlone(cluster, id, request_);
  EXPECT_EQ(cluster.stats().damaged, 1u);
  EXPECT_TRUE(cluster.Until([&] { return cluster.BlocksHeld() == 0; })) << cluster.BlocksHeld();
}

TEST_P(DamagedNodes, WithoutDigestsTheSameBitGivesAnotherAnswer) {
  NodeCluster cluster(model_, {.digests = attention::Digests::kNone});
  const uint64_t id = SubmitAndPause(cluster, request_);
  cluster.attention_device(0).FlipBits(4);  // of every float
  cluster.Resume(id);
  ASSERT_TRUE(cluster.UntilFinished(id));
  EXPECT_NE(cluster.stream(id).logits, Alone(request_).logits);
}

TEST_P(DamagedNodes, BlocksThatAreExchangedBeforeAMoveAreNotGivenAwayAndTheSequenceBeginsAgain) {
  NodeCluster cluster(model_, {});
  const uint64_t id = SubmitAndPause(cluster, request_);
  cluster.Add(1);
  std::swap(SetsOf(cluster, 0)[0], SetsOf(cluster, 0)[1]);
  cluster.Drain(0);
  EXPECT_EQ(cluster.attention(0).counters().damaged_sequences, 1u);
  EXPECT_EQ(cluster.stats().moves, 0u);
  cluster.Resume(id);
  ExpectAsAlone(cluster, id, request_);
  EXPECT_TRUE(cluster.Until([&] { return cluster.BlocksHeld() == 0; })) << cluster.BlocksHeld();
}

INSTANTIATE_TEST_SUITE_P(, DamagedNodes, testing::Bool(),
                         [](const auto& info) { return info.param ? "LinearStates" : "Softmax"; });

}  // namespace
}  // namespace dovetail::test
