#include "scheduler/core/prefill_cost.h"

#include <gtest/gtest.h>

#include <random>

#include "compute_worker/core/prompt_scratch.h"
#include "proto/step_layout.h"

// What is predicted of a step is what a compute worker does: the same bytes, and the same tokens in its scratch.

namespace dovetail::scheduler {
namespace {

using proto::PrefixExchange;

proto::AttentionTable Table() {
  const proto::SoftmaxSpec full{.query_heads = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 16, .scale = 1};
  proto::SoftmaxSpec windowed = full;
  windowed.window = 100;
  windowed.kv_heads = 1;
  const proto::LinearSpec linear{.heads = 2,
                                 .key_dim = 8,
                                 .value_dim = 8,
                                 .delta = true,
                                 .token_decay = true,
                                 .token_rate = true,
                                 .conv_width = 4};
  std::vector<proto::LinearConstants> constants(4);
  constants[2].conv.assign(size_t{4} * linear.heads * linear.channels(), 0.5f);
  return *proto::AttentionTable::Build({full, windowed, linear, full}, constants);
}

// A compute worker's own accounts of a prompt: its scratch and the layouts of its step.
struct Worker {
  const proto::AttentionTable& table;
  compute::PromptScratch scratch;
  SequenceId sequence{1};

  proto::PrefixTraffic Step(const PromptStep& step, const compute::PromptScratch::Part*& part) {
    const int tokens = static_cast<int>(step.tokens);
    Position gather_begin = proto::kOpenEnd;
    const Position missing = scratch.FirstMissing(sequence, step.ctx_len, step.ctx_len);
    part = nullptr;
    if (step.exchange == PrefixExchange::kGather && missing < step.ctx_len) {
      part = scratch.BeginGathering(
          sequence, {.from = step.ctx_len, .ctx_len = step.ctx_len, .q_len = tokens, .more = !step.last});
      if (part != nullptr) gather_begin = missing;
    }
    if (part == nullptr) part = scratch.Begin(sequence, step.ctx_len, tokens, !step.last);
    proto::EntryExchange exchange;
    if (part != nullptr) exchange = {.attend_end = part->begin, .gather_begin = gather_begin};
    exchange.states = step.ctx_len > 0 ? proto::StateExchange::kFetch : proto::StateExchange::kLeave;
    proto::PrefixTraffic traffic;
    for (const LayerGroup group : table.op_group) {
      const proto::SoftmaxSpec& spec = table.softmax(group);
      proto::StepLayout layout;
      layout.Add(0, 0, {0, spec.kv_heads}, {}, step.ctx_len, tokens, spec, exchange);
      layout.Finish(spec);
      traffic = Sum(traffic, proto::TrafficOf(layout, spec));
    }
    return traffic;
  }
};

// A small rest of a long prompt, whose K and V are on attention workers: however many bytes that is, they come, for the
// rest would keep those busy far longer.
TEST(PrefillCost, AllThatTheScratchHasRoomForIsGathered) {
  const proto::SoftmaxSpec spec{.query_heads = 32, .kv_heads = 8, .key_dim = 128, .value_dim = 128, .scale = 1};
  const auto table = *proto::AttentionTable::Build({spec, spec});
  PromptStep step{.ctx_len = 126784, .tokens = 1216, .exchange = PrefixExchange::kGather, .last = true};
  const StepWork work = WorkOf(table, step);
  EXPECT_EQ(work.exchange, PrefixExchange::kGather);
  EXPECT_EQ(work.traffic.gathered_bytes, int64_t{2} * 126784 * 8 * 256 * 2);
  EXPECT_EQ(work.asked_flops, 0);
  const auto rank = [&](uint32_t blocks) {
    return WorkOf(table, {.ctx_len = 126848,
                          .base = 126784,
                          .tokens = 576,
                          .exchange = PrefixExchange::kGatherDirect,
                          .scratch_blocks = blocks,
                          .last = true});
  };
  EXPECT_EQ(rank(UINT32_MAX).asked_flops, 0);
  EXPECT_EQ(rank(UINT32_MAX).traffic.gathered_bytes, int64_t{2} * 126784 * 8 * 256 * 2);
  EXPECT_GT(rank(1000).asked_flops, 0) << "no room";
}

TEST(PrefillCost, BytesAndScratchAreThoseOfAComputeWorker) {
  const proto::AttentionTable table = Table();
  int gathered = 0, asked = 0, here = 0, elsewhere = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    std::mt19937_64 random(seed);
    const auto blocks = static_cast<uint32_t>(random() % 4 == 0 ? random() % 12 : random() % 200);
    Worker worker{table, compute::PromptScratch(table, blocks)};
    HeldTokens held;
    Position at = 64 * static_cast<Position>(random() % 5);
    for (int i = 0; i < 8; ++i) {
      PromptStep step{.ctx_len = at,
                      .tokens = 16 + static_cast<int64_t>(random() % 300),
                      .exchange = random() % 2 == 0 ? PrefixExchange::kAsk : PrefixExchange::kGather,
                      .held = held,
                      .scratch_blocks = blocks,
                      .last = i == 7};
      const StepWork work = WorkOf(table, step);
      const compute::PromptScratch::Part* part = nullptr;
      const proto::PrefixTraffic traffic = worker.Step(step, part);
      SCOPED_TRACE(absl::StrCat("seed ", seed, ", step ", i));
      ASSERT_EQ(work.traffic, traffic);
      ASSERT_EQ(work.exchange == PrefixExchange::kGather, traffic.gathered_bytes > 0);
      ASSERT_EQ(work.here_flops > 0, part != nullptr);
      gathered += traffic.gathered_bytes > 0;
      asked += traffic.asked_bytes > 0;
      here += part != nullptr;
      elsewhere += part == nullptr;
      worker.scratch.End(worker.sequence, true, at + step.tokens);
      held = work.held;
      // Other compute workers take a part in between.
      at += step.tokens;
      if (random() % 2 == 0) at = (at / 64 + 1 + static_cast<Position>(random() % 3)) * 64;
    }
  }
  EXPECT_GT(gathered, 300);
  EXPECT_GT(asked, 300);
  EXPECT_GT(here, 1000);
  EXPECT_GT(elsewhere, 100);
}

TEST(PrefillCost, FlopsOfAllTokensAreDividedBetweenHereAndThere) {
  const proto::AttentionTable table = Table();
  const StepWork asks = WorkOf(table, {.ctx_len = 1024, .tokens = 64});
  const StepWork gathers = WorkOf(table, {.ctx_len = 1024, .tokens = 64, .exchange = PrefixExchange::kGather});
  EXPECT_GT(asks.asked_flops, 0);
  EXPECT_EQ(gathers.asked_flops, 0);
  EXPECT_EQ(asks.here_flops + asks.asked_flops, gathers.here_flops);
  // Two full ops: 64 rows over 1024 tokens, and over those before them; one sees a hundred.
  const double full = 2 * 2.0 * (64 * 1024 + 64 * 65 / 2) * 4 * (8 + 16), windowed = 2.0 * 64 * 100 * 4 * (8 + 16);
  EXPECT_EQ(gathers.here_flops, full + windowed);
}

ComputeRates Rates(double token_s, double flop_s) { return {token_s, flop_s}; }

TEST(PrefillCost, OwnAttentionHidesWhatIsAskedButNotWhatIsGathered) {
  StepWork work{.tokens = 100, .here_flops = 5, .asked_flops = 4, .traffic = {.asked_bytes = 3}};
  const ComputeRates rates = Rates(0.01, 1);
  const PlaneRates plane{2.0, 1.0};
  Prediction asks = Predict({&work, 1}, {&rates, 1}, plane);
  EXPECT_DOUBLE_EQ(asks.seconds, 1 + 8 + 3);
  EXPECT_EQ(asks.bound, PrefillBound::kPlane);
  work = {.tokens = 100, .here_flops = 5, .traffic = {.gathered_bytes = 30}, .exchange = PrefixExchange::kGather};
  const Prediction gathers = Predict({&work, 1}, {&rates, 1}, plane);
  EXPECT_DOUBLE_EQ(gathers.seconds, 1 + 5 + 30);
  EXPECT_EQ(gathers.bound, PrefillBound::kLink);
}

TEST(PrefillCost, TheAttentionWorkerAnswersAllRanks) {
  const std::vector<StepWork> ranks(3, StepWork{.tokens = 10, .asked_flops = 6});
  const std::vector<ComputeRates> rates(3, Rates(0.1, 1));
  const Prediction group = Predict(ranks, rates, {1.0, std::nullopt});
  EXPECT_DOUBLE_EQ(group.seconds, 18);
  EXPECT_EQ(group.bound, PrefillBound::kPlane);
  EXPECT_DOUBLE_EQ(Predict({ranks.data(), 1}, {rates.data(), 1}, {1.0, std::nullopt}).seconds, 1 + 6);
}

TEST(PrefillCost, TheAttentionWorkersLinkServesOneRankAfterTheOther) {
  std::vector<StepWork> ranks(3, StepWork{.tokens = 10, .traffic = {.gathered_bytes = 6}});
  const std::vector<ComputeRates> rates(3, Rates(0.1, 1));
  const Prediction group = Predict(ranks, rates, {1.0, 2.0});
  EXPECT_DOUBLE_EQ(group.seconds, 3 * 12);
  EXPECT_EQ(group.bound, PrefillBound::kLink);
  EXPECT_DOUBLE_EQ(Predict({ranks.data(), 1}, {rates.data(), 1}, {1.0, 2.0}).seconds, 1 + 12);
}

TEST(PrefillCost, RanksGiveEachOtherThingsWhileTheyComputeAndEachPairOverItsOwnLink) {
  const std::vector<StepWork> ranks(3, StepWork{.tokens = 10,
                                                .here_flops = 4,
                                                .traffic = {.chain_bytes = 1, .direct_bytes = 5},
                                                .exchange = PrefixExchange::kGatherDirect});
  std::vector<ComputeRates> rates(3, Rates(0.1, 1));
  EXPECT_DOUBLE_EQ(Predict(ranks, rates, {1.0, 100.0}).seconds, 1 + 4) << "no rate of the link is known";
  for (ComputeRates& rate : rates) rate.link_byte_s = 0.5;
  EXPECT_DOUBLE_EQ(Predict(ranks, rates, {1.0, 100.0}).seconds, 1 + 4) << "3 seconds are hidden";
  rates[2].link_byte_s = 2;
  const Prediction slow_link = Predict(ranks, rates, {1.0, 100.0});
  EXPECT_DOUBLE_EQ(slow_link.seconds, 12);
  EXPECT_EQ(slow_link.bound, PrefillBound::kLink);
}

}  // namespace
}  // namespace dovetail::scheduler
