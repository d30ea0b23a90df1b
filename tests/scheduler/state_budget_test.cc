#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "attention_worker/core/sequence_table.h"
#include "proto/state_blocks.h"
#include "scheduler/core/kv_budget.h"
#include "tests/scheduler/core_parts.h"

// What sequences are charged for linear states where linear layers of prompts run on compute workers: what attention
// workers hold of them, and no less.

namespace dovetail::scheduler {
namespace {

using ::testing::HasSubstr;

constexpr int kHeads = 4, kKvHeads = 2;

// A linear op of 4 heads, a block each; with softmax, another op of 2 KV heads.
proto::AttentionTable Hybrid(bool with_softmax) {
  proto::LinearSpec state;
  state.heads = kHeads;
  state.key_dim = state.value_dim = 16;
  state.blocks_per_head = 1;
  proto::LinearConstants decays;
  decays.log_decay.assign(kHeads, -0.1f);
  if (!with_softmax) return *proto::AttentionTable::Build({state}, {decays});
  proto::SoftmaxSpec softmax;
  softmax.query_heads = softmax.kv_heads = kKvHeads;
  softmax.key_dim = softmax.value_dim = 16;
  softmax.scale = 0.25f;
  return *proto::AttentionTable::Build({state, softmax}, {decays, {}});
}

SchedulerOptions StatesOnly() {
  SchedulerOptions options = SmallCluster().scheduler;
  options.attention = Hybrid(false);
  options.max_num_batched_tokens = 8192;
  options.max_model_len = 1 << 20;
  return options;
}

// A core, and what it does about one event after the other.
class StateBudgetTest : public ::testing::Test {
 protected:
  void Tell(Event event) {
    now_ += absl::Milliseconds(1);
    actions_.clear();
    core_.Handle(event, now_, actions_);
    EXPECT_TRUE(core_.CheckInvariants().ok()) << core_.CheckInvariants();
  }
  template <typename A>
  const A* First() const {
    for (const Action& action : actions_)
      if (const A* const a = std::get_if<A>(&action)) return a;
    return nullptr;
  }
  void Submit(uint64_t id, int prompt) {
    GenerationRequest request = Ask(prompt, 10, "a", id);
    request.id = RequestId(id);
    request.use_prefix_cache = false;
    Tell(RequestArrived{std::make_shared<GenerationRequest>(request)});
  }

  SchedulerCore core_{StatesOnly(), 0};
  std::vector<Action> actions_;
  absl::Time now_ = absl::UnixEpoch();
};

// 8,192 tokens of a step have 128 blocks of 64; of these 16 are snapshots and a few are the end.
constexpr uint64_t kBlocksOfAStep = (4 + 16 + 2) * kHeads;

TEST_F(StateBudgetTest, APromptOfAnyLengthIsTakenWhereTheSnapshotsOfAStepFit) {
  Tell(AttentionWorkerJoined{WorkerId(1), Epoch(1), kBlocksOfAStep});
  Tell(ComputeWorkerJoined{WorkerId(100), /*leaves_states=*/true});
  EXPECT_EQ(core_.LongestSequence(), 1 << 20);
  Submit(1, 500'000);
  EXPECT_NE(First<OpenSequence>(), nullptr);
}

TEST_F(StateBudgetTest, WhereAttentionWorkersComputeThemItIsRefused) {
  Tell(AttentionWorkerJoined{WorkerId(1), Epoch(1), kBlocksOfAStep});
  Tell(ComputeWorkerJoined{WorkerId(100), /*leaves_states=*/false});
  EXPECT_EQ(core_.LongestSequence(), 22 * 64);
  Submit(1, 500'000);
  EXPECT_EQ(First<OpenSequence>(), nullptr);
  ASSERT_NE(First<EmitUpdate>(), nullptr);
  EXPECT_THAT(First<EmitUpdate>()->update.error, HasSubstr("hold 1408 tokens of one sequence"));
}

TEST_F(StateBudgetTest, OneWorkerThatLeavesNoneMakesSequencesWithoutRoomBeginAgain) {
  Tell(AttentionWorkerJoined{WorkerId(1), Epoch(1), 2 * kBlocksOfAStep});
  Tell(ComputeWorkerJoined{WorkerId(100), true});
  Submit(1, 100'000);
  const OpenSequence* open = First<OpenSequence>();
  ASSERT_NE(open, nullptr);
  const double before = core_.stats().kv_usage;
  EXPECT_LE(before, 0.5);
  Tell(ComputeWorkerJoined{WorkerId(101), false});
  EXPECT_LT(core_.LongestSequence(), 100'000);
  EXPECT_EQ(core_.stats().running_sequences, 0);
  EXPECT_EQ(core_.stats().kv_usage, 0);
  Tell(ComputeWorkerLost{WorkerId(101)});
  EXPECT_EQ(core_.LongestSequence(), 1 << 20);
}

// A group has the snapshots of all of its tokens at once, and each rank leaves its last two blocks.
TEST(StateAccounts, AGroupIsChargedForWhatItsRanksLeave) {
  SchedulerOptions options = StatesOnly();
  options.max_num_batched_tokens = 512;
  CoreParts parts(options);
  parts.accounts.budget().SetLinearPrompts(proto::LinearPrompts::kOnComputeWorkers);
  parts.AddAttentionWorker(0, 1000);
  Sequence& a = parts.AddReady(16384);
  const uint64_t alone = parts.accounts.budget().workers()[0].used;
  EXPECT_EQ(alone, uint64_t{4 + 1 + 2} * kHeads);
  EXPECT_TRUE(parts.accounts.ReserveForGroup(a, std::vector<Position>{0, 8192, 16384}));
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, uint64_t{3 + 32 + 2} * kHeads)
      << "128, 256, 384, every 512, and the block before each end";
  parts.accounts.EndGroup(a);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, alone);
}

// An attention worker with as many blocks as one sequence is charged for there, and its steps.
class ChargedWorker {
 public:
  ChargedWorker(const proto::AttentionTable& table, const proto::Placement& shards, uint64_t blocks)
      : table_(table), sequences_(table_, static_cast<uint32_t>(blocks)) {
    EXPECT_TRUE(
        sequences_.Open({.sequence = SequenceId(1), .shards = {shards.begin(), shards.end()}, .hashes = {}}).ok());
  }

  // What the ranks of a group append, in any order; a step alone is one of two cuts.
  void Take(const std::vector<Position>& cuts, bool states, std::mt19937_64& random) {
    attention::SequenceState& sequence = *sequences_.Find(SequenceId(1));
    ASSERT_TRUE(sequences_.Commit(sequence, cuts[0], {}).ok());
    std::vector<size_t> order;
    for (size_t rank = 0; rank + 1 < cuts.size(); ++rank) order.push_back(rank);
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t rank : order) {
      const int q_len = rank == order[0] ? static_cast<int>(cuts.back() - cuts[0]) : 0;
      const attention::SequenceTable::Growth growth{&sequence, q_len, cuts[rank], cuts[rank + 1], states};
      const int64_t blocks = sequences_.BlocksToAppend({&growth, 1});
      ASSERT_TRUE(sequences_.MakeRoom(blocks))
          << blocks << " more than " << sequences_.status().blocks_in_use << " of " << sequences_.status().blocks_total;
      std::vector<attention::BlockCopy> copies;
      sequences_.Append(growth, copies);
    }
    ASSERT_TRUE(sequences_.CheckInvariants().ok()) << sequences_.CheckInvariants();
  }

 private:
  const proto::AttentionTable& table_;
  attention::SequenceTable sequences_;
};

// The whole sequence on one worker, or its heads on two.
std::vector<proto::Placement> PlacementsOf(const proto::AttentionTable& table, bool divided) {
  if (!divided) return {proto::WholePlacement(table, WorkerId(0), Epoch(1))};
  std::vector<proto::Placement> parts(2);
  for (const proto::Shard& shard : proto::WholePlacement(table, WorkerId(0), Epoch(1)))
    for (uint32_t worker = 0; worker < 2; ++worker) {
      proto::Shard part = shard;
      const int half = shard.kv_heads.end / 2;
      part.worker = WorkerId(worker);
      part.kv_heads = worker == 0 ? proto::HeadRange{0, half} : proto::HeadRange{half, shard.kv_heads.end};
      parts[worker].push_back(part);
    }
  return parts;
}

// A prompt in steps and groups of random sizes, then decodes, on workers that have what it is charged for and no more.
void RunCharged(uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto any = [&](int64_t from, int64_t to) { return from + static_cast<int64_t>(random() % (to - from + 1)); };
  const proto::AttentionTable table = Hybrid(any(0, 1) == 1);
  const int chunk = static_cast<int>(std::vector<int64_t>{64, 200, 512, 2048, 5000}[any(0, 4)]);
  const bool divided = any(0, 1) == 1;
  const Position prompt = any(0, 2) > 0 ? any(1, 2000) : any(1, 30000), end = prompt + any(0, 300);
  const int most_ranks = static_cast<int>(any(1, 5));

  std::vector<std::vector<Position>> steps;
  for (Position at = 0; at < end;) {
    std::vector<Position> cuts = {at};
    const int ranks = at < prompt ? static_cast<int>(any(1, most_ranks)) : 1;
    for (int rank = 0; rank < ranks && at < prompt; ++rank) {
      Position next = std::min(prompt, at + any(1, chunk));
      if (rank + 1 < ranks) next = next / kSegmentTokens * kSegmentTokens;  // cuts of a group
      if (next > at) cuts.push_back(at = next);
    }
    if (cuts.size() == 1) cuts.push_back(at = std::min(end, at < prompt ? prompt : at + 1));
    if (cuts[1] - cuts[0] > chunk) cuts = {cuts[0], at = cuts[0] + chunk};
    steps.push_back(cuts);
  }

  KvBudget budget(table, chunk);
  budget.SetLinearPrompts(proto::LinearPrompts::kOnComputeWorkers);
  for (uint32_t worker = 0; worker < 2; ++worker) budget.Join(WorkerId(worker), Epoch(1), 1 << 30);
  for (const proto::Placement& placement : PlacementsOf(table, divided)) {
    uint64_t charged = TotalBlocks(budget.CostOf(placement, {.end = end}));
    for (const std::vector<Position>& cuts : steps)
      if (cuts.size() > 2)
        charged =
            std::max(charged, TotalBlocks(budget.CostOf(placement, {.end = end,
                                                                    .chunk = int(cuts.back() - cuts[0]),
                                                                    .group_states = proto::StateBlocksHeld(cuts)})));
    ChargedWorker worker(table, placement, charged);
    for (const std::vector<Position>& cuts : steps) {
      const bool states = cuts.size() > 2 || cuts[1] - cuts[0] >= 16;
      worker.Take(cuts, states, random);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(StateCharges, AreEnoughForEveryStepAndGroup) {
  for (uint64_t seed = 1; seed <= 2000 && !testing::Test::HasFailure(); ++seed) RunCharged(seed);
}

}  // namespace
}  // namespace dovetail::scheduler
