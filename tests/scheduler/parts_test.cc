#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/core/block_hasher.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/token_log.h"
#include "tests/scheduler/fake_cluster.h"

// The parts that SchedulerCore is made of, each alone.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TokenLog, ATokenEntersOnceAndInOrder) {
  TokenLog log;
  EXPECT_EQ(log.Record(0, 7), TokenLog::Outcome::kLogged);
  EXPECT_EQ(log.Record(1, 8), TokenLog::Outcome::kLogged);
  EXPECT_EQ(log.Record(1, 9), TokenLog::Outcome::kAlreadyLogged);
  EXPECT_EQ(log.Record(3, 9), TokenLog::Outcome::kGap);
  EXPECT_THAT(log.tokens(), ElementsAre(7, 8));
}

std::vector<TokenId> BlockOfTokens(TokenId first) {
  std::vector<TokenId> tokens(kSegmentTokens);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST(BlockHashes, DependOnModelTenantSaltAndEverythingBefore) {
  const proto::BlockHash seed = ChainSeed(1, "tenant", "salt");
  EXPECT_EQ(seed, ChainSeed(1, "tenant", "salt"));
  EXPECT_NE(seed, ChainSeed(2, "tenant", "salt"));
  EXPECT_NE(seed, ChainSeed(1, "tenant", "other"));
  EXPECT_NE(seed, ChainSeed(1, "other", "salt"));
  EXPECT_NE(seed, ChainSeed(1, "tenan", "tsalt"));  // the same letters
  const proto::BlockHash first = NextBlockHash(seed, BlockOfTokens(0));
  EXPECT_EQ(first, NextBlockHash(seed, BlockOfTokens(0)));
  EXPECT_NE(first, NextBlockHash(seed, BlockOfTokens(1)));
  EXPECT_NE(NextBlockHash(first, BlockOfTokens(0)),
            NextBlockHash(NextBlockHash(seed, BlockOfTokens(1)), BlockOfTokens(0)));
}

class Budget : public ::testing::Test {
 protected:
  static constexpr int kOps = 2, kHeads = 3, kChunk = 128;

  Budget() : table_(SmallTable(kOps, kHeads)), budget_(table_, kChunk) { budget_.Join(WorkerId(4), Epoch(1), 60); }

  proto::AttentionTable table_;
  KvBudget budget_;
};

TEST_F(Budget, ATokenMoreThanAMultipleOf64CostsABlockOfEveryHeadAndOp) {
  const proto::Placement whole = proto::WholePlacement(table_, WorkerId(4), Epoch(1));
  EXPECT_EQ(TotalBlocks(budget_.CostOf(whole, {.end = 64})), 1u * kOps * kHeads);
  EXPECT_EQ(TotalBlocks(budget_.CostOf(whole, {.end = 65})), 2u * kOps * kHeads);
  EXPECT_EQ(TotalBlocks(budget_.CostOf(whole, {.first_block = 1, .end = 65})), 1u * kOps * kHeads);
}

TEST_F(Budget, WhatIsHeldLacksElsewhereUntilItIsGivenBack) {
  const proto::Placement whole = proto::WholePlacement(table_, WorkerId(4), Epoch(1));
  const Charges six = budget_.CostOf(whole, {.end = 6 * 64});   // 36 of 60 blocks
  const Charges five = budget_.CostOf(whole, {.end = 5 * 64});  // 30
  Charges held;
  EXPECT_FALSE(budget_.Lacking(six, held).has_value());
  budget_.Exchange(held, six);
  EXPECT_EQ(budget_.Lacking(five, {}), 0);
  EXPECT_FALSE(budget_.Lacking(five, held).has_value());  // instead of, not in addition
  EXPECT_TRUE(budget_.FitsEmpty(five));
  budget_.Exchange(held, {});
  EXPECT_FALSE(budget_.Lacking(five, {}).has_value());
  EXPECT_EQ(budget_.fullest_usage(), 0);
}

TEST(WindowedBudget, AWindowNeverCostsMoreThanItselfAndAChunk) {
  const proto::AttentionTable table = SmallTable(0, 1, 1);  // one op that sees 96 tokens
  KvBudget budget(table, 128);
  budget.Join(WorkerId(0), Epoch(1), 1000);
  const proto::Placement whole = proto::WholePlacement(table, WorkerId(0), Epoch(1));
  const uint64_t most = 2 + 2 + 3;  // blocks of the window, of a chunk, and what straddles
  EXPECT_EQ(TotalBlocks(budget.CostOf(whole, {.end = 100 * 64})), most);
  EXPECT_LT(TotalBlocks(budget.CostOf(whole, {.end = 100 * 64, .ctx_len = 100 * 64 - 1})), most);
}

// A request of one choice, waiting in `queues`.
struct Waiting {
  Waiting(TenantQueues& queues, const std::string& tenant, uint64_t ordinal, int priority = 0, bool restarted = false) {
    auto request = std::make_shared<GenerationRequest>();
    request->tenant = tenant;
    request->priority = priority;
    state.request = std::move(request);
    state.ordinal = ordinal;
    state.tenant = &queues.Enter(tenant);
    sequence.request = &state;
    sequence.restarted = restarted;
    queues.Push(sequence);
  }
  RequestState state;
  Sequence sequence;
};

TEST(Queues, TheTenantServedLeastIsNextAndComingBackEarnsNothing) {
  TenantQueues queues;
  Waiting a(queues, "a", 1), b(queues, "b", 2);
  a.state.tenant->served = 100;
  b.state.tenant->served = 40;
  EXPECT_EQ(queues.LeastServed()->name, "b");
  Waiting c(queues, "c", 3);
  EXPECT_EQ(c.state.tenant->served, 40u);
  queues.Remove(b.sequence);
  queues.Remove(c.sequence);
  EXPECT_EQ(queues.LeastServed()->name, "a");
  queues.Remove(a.sequence);
  EXPECT_EQ(queues.LeastServed(), nullptr);
}

TEST(Queues, OneTenantsRequestsGoByRestartThenPriorityThenArrival) {
  TenantQueues queues;
  Waiting late(queues, "a", 3), early(queues, "a", 1), urgent(queues, "a", 4, -1), preempted(queues, "a", 5, 9, true);
  for (Waiting* next : {&preempted, &urgent, &early, &late}) {
    EXPECT_EQ(queues.LeastServed()->waiting.begin()->second, &next->sequence);
    queues.Remove(next->sequence);
  }
}

TEST(Queues, TheLongestQueueLosesItsLastForATenantWithFewer) {
  TenantQueues queues;
  Waiting first(queues, "a", 1), second(queues, "a", 2), third(queues, "a", 3), other(queues, "b", 4);
  EXPECT_EQ(queues.LastOfLongest("b"), &third.sequence);
  EXPECT_EQ(queues.LastOfLongest("new"), &third.sequence);
  EXPECT_EQ(queues.LastOfLongest("a"), nullptr);
}

TEST(Options, StepTokensFollowTheDeviceWhereNoneAreGiven) {
  const auto chosen = [](SchedulerOptions options, bool on_gpu) {
    options.ChooseStepTokens(on_gpu);
    return options.max_num_batched_tokens;
  };
  SchedulerOptions options;
  EXPECT_EQ(chosen(options, true), 2048) << "given";
  options.max_num_batched_tokens = 0;
  EXPECT_EQ(chosen(options, false), 512);
  EXPECT_EQ(chosen(options, true), 8192);
  options.max_num_seqs = 1000;
  EXPECT_EQ(chosen(options, false), 1000) << "every running sequence must get a token";
  options.enable_chunked_prefill = false;
  options.max_model_len = 10'000;
  EXPECT_EQ(chosen(options, true), 10'000) << "the longest prompt must fit a step";
  options.max_model_len = 100'000;
  EXPECT_EQ(chosen(options, true), proto::kMaxStepTokens);
}

TEST(Options, TokensOfARankFollowTheDeviceWhereNoneAreGiven) {
  const auto chosen = [](SchedulerOptions options, bool on_gpu) {
    options.ChooseStepTokens(on_gpu);
    return options.prefill_rank_tokens;
  };
  SchedulerOptions options;
  EXPECT_EQ(chosen(options, true), 1024) << "given";
  options.prefill_rank_tokens = 0;
  EXPECT_EQ(chosen(options, false), 1024);
  EXPECT_EQ(chosen(options, true), 4096);
  options.prefill_ranks = 2;
  EXPECT_EQ(chosen(options, true), 1024) << "two ranks are asked for";
}

TEST(Options, AreRefusedWithTheFlagsName) {
  SchedulerOptions options;
  options.attention = SmallTable();
  EXPECT_TRUE(options.Validate().ok());
  const auto refused = [](SchedulerOptions changed) { return std::string(changed.Validate().message()); };
  SchedulerOptions few = options;
  few.max_num_batched_tokens = options.max_num_seqs - 1;
  EXPECT_THAT(refused(few), HasSubstr("--max-num-batched-tokens: 255 is less than --max-num-seqs 256"));
  SchedulerOptions unset = options;
  unset.max_num_batched_tokens = 0;
  EXPECT_THAT(refused(unset), HasSubstr("--max-num-batched-tokens: 0 is not in 1..65472"));
  SchedulerOptions whole = options;
  whole.enable_chunked_prefill = false;
  whole.max_model_len = 4096;
  EXPECT_THAT(refused(whole), HasSubstr("the longest prompt would fit no step"));
  SchedulerOptions odd = options;
  odd.token_shard_tokens = 100;
  EXPECT_THAT(refused(odd), HasSubstr("--token-shard-tokens: 100"));
  SchedulerOptions none = options;
  none.micro_batches = 0;
  EXPECT_THAT(refused(none), HasSubstr("--micro-batches: 0 is not in 1..16"));
}

}  // namespace
}  // namespace dovetail::scheduler
