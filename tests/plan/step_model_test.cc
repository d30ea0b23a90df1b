#include "plan/step_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/plan/small_model.h"
#include "tests/plan/small_profile.h"

namespace dovetail::plan {
namespace {

using ::testing::HasSubstr;

// Seconds by hand: SmallProfile() and SmallModel() have round numbers.

proto::StepEntry Entry(Position ctx_len, int tokens, WorkerId worker = WorkerId(0)) {
  proto::StepEntry entry;
  entry.ctx_len = ctx_len;
  entry.tokens.assign(static_cast<size_t>(tokens), 1);
  entry.sample = true;
  entry.placement = proto::WholePlacement(SmallModel().attention, worker, Epoch(1));
  return entry;
}

proto::StepPlan PlanOf(std::vector<proto::StepEntry> entries) {
  proto::StepPlan plan;
  plan.entries = std::move(entries);
  return plan;
}

StepModel Whole(const ModelWork& work = SmallModel()) { return *StepModel::Create(work, SmallProfile(), std::nullopt); }
StepModel Split() {
  return *StepModel::Create(SmallModel(), SmallProfile(), OtherDevice{SmallProfile(), SmallProfile().links[0]});
}

TEST(StepModel, ADecodeReadsWeightsAndWhatItSees) {
  const StepCost cost = Whole().CostOf(PlanOf({Entry(99, 1)}));
  EXPECT_NEAR(cost.parts.weights_s, 2000e-9 + 500e-9, 1e-15);
  EXPECT_NEAR(cost.parts.arithmetic_s, 0, 1e-15);
  EXPECT_NEAR(cost.parts.attention_s, 2 * 100 * 256 / 1e9, 1e-15);
  EXPECT_EQ(cost.parts.prompts_s, 0);
  EXPECT_EQ(cost.parts.link_s, 0) << "there is no link";
  // A step, a sequence, two layers with it, 220 values, 50 entries of the vocabulary.
  EXPECT_NEAR(cost.parts.overhead_s, 1e-3 + 1e-4 + 2 * (1e-5 + 1e-6) + 220e-9 + 50e-9, 1e-15);
  EXPECT_NEAR(cost.compute_s, cost.parts.Sum() - cost.parts.attention_s, 1e-15);
}

TEST(StepModel, WeightsOfASmallModelComeFromCaches) {
  DeviceProfile profile = SmallProfile();
  profile.cache_bytes = 1e9;
  profile.products[0].cached_points = {{1, 0.25e-9}};
  const auto small = StepModel::Create(SmallModel(), profile, std::nullopt);
  ASSERT_TRUE(small.ok()) << small.status();
  const proto::StepPlan plan = PlanOf({Entry(99, 1)});
  EXPECT_DOUBLE_EQ(small->CostOf(plan).parts.weights_s, Whole().CostOf(plan).parts.weights_s / 4);
}

// 128 codes and two scales of 2 bytes a token and op, in place of 256 bytes.
TEST(StepModel, ADecodeReadsHalfAsMuchInInt8) {
  ModelWork work = SmallModel();
  work.kv_storage = KvStorage::kInt8;
  EXPECT_THAT(std::string(StepModel::Create(work, SmallProfile(), std::nullopt).status().message()),
              HasSubstr("no attention over int8 K and V"));
  DeviceProfile profile = SmallProfile();
  profile.attention.push_back({DType::kBF16, 64, 1, 2e9, 1e9, KvStorage::kInt8});
  const auto whole = StepModel::Create(work, profile, std::nullopt);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_NEAR(whole->CostOf(PlanOf({Entry(99, 1)})).parts.attention_s, 2 * 100 * 132 / 2e9, 1e-15);
  const auto split = StepModel::Create(work, SmallProfile(), OtherDevice{profile, SmallProfile().links[0]});
  ASSERT_TRUE(split.ok()) << "a compute worker that attends prompts as they come: " << split.status();
  const StepCost one = split->CostOf(PlanOf({Entry(99, 1)})), as_sent = Split().CostOf(PlanOf({Entry(99, 1)}));
  EXPECT_NEAR(one.attention[0].seconds, 2 * 100 * 132 / 2e9, 1e-15);
  EXPECT_EQ(one.parts.link_s, as_sent.parts.link_s) << "what crosses has the wire's type";
}

TEST(StepModel, MoreRowsAddArithmetic) {
  std::vector<proto::StepEntry> entries;
  for (int i = 0; i < 51; ++i) entries.push_back(Entry(9, 1));
  const StepCost cost = Whole().CostOf(PlanOf(entries));  // 6 ns a weight
  EXPECT_NEAR(cost.parts.weights_s, 2500e-9, 1e-15);
  EXPECT_NEAR(cost.parts.arithmetic_s, 5 * 2500e-9, 1e-15);
  EXPECT_NEAR(cost.parts.attention_s, 51 * 2 * 10 * 256 / 1e9, 1e-15);
}

TEST(StepModel, APromptAttendsOnTheComputeWorker) {
  proto::StepEntry entry = Entry(0, 64);
  entry.sample = false;
  const StepCost cost = Split().CostOf(PlanOf({entry}));
  const double flops = 2 * (64 * 65 / 2) * 2.0 * 2 * (64 + 64);  // ops, pairs, a multiplication and an addition, heads
  EXPECT_NEAR(cost.parts.prompts_s, flops / 1e9, 1e-12);
  EXPECT_NEAR(cost.work.here_flops, flops, 1e-6);
  EXPECT_EQ(cost.work.tokens, 64);
  EXPECT_EQ(cost.parts.attention_s, 0);
  EXPECT_NEAR(cost.parts.link_s, 2 * 2 * 1e-5 + 64 * 2 * 256 / 1e9, 1e-15) << "its K and V leave";
}

TEST(StepModel, ALaterRankOfAGroupAsksAboutEarlierTokens) {
  proto::StepPlan plan = PlanOf({Entry(64, 64)});
  plan.part = {.group = StepId(1), .base = 0, .end = 128, .rank = 1, .ranks = 2};
  const StepCost cost = Split().CostOf(plan);
  const double pair = 2 * 2.0 * 2 * (64 + 64);
  EXPECT_NEAR(cost.work.here_flops, pair * (64 * 65 / 2), 1e-6);
  EXPECT_NEAR(cost.work.asked_flops, pair * 64 * 64, 1e-6);
  EXPECT_NEAR(cost.parts.attention_s, pair * 64 * 64 / 1e9, 1e-12);
}

TEST(StepModel, TheAttentionWorkerWithMostToDoDecides) {
  const StepCost cost = Split().CostOf(PlanOf({Entry(99, 1, WorkerId(1)), Entry(199, 1, WorkerId(2))}));
  ASSERT_EQ(cost.attention.size(), 2u);
  EXPECT_NEAR(cost.attention[0].seconds, 2 * 100 * 256 / 1e9, 1e-15);
  EXPECT_NEAR(cost.attention[1].seconds, 2 * 200 * 256 / 1e9, 1e-15);
  EXPECT_NEAR(cost.parts.attention_s, cost.attention[1].seconds, 1e-15);
  // Per op two query heads of q and o, and k and v: 768 bytes; each op crosses twice.
  EXPECT_NEAR(cost.parts.link_s, 2 * 2 * 1e-5 + 2 * 768 / 1e9, 1e-15);
}

TEST(StepModel, OnlyTheExpertsThatAreMetAreRead) {
  ModelWork work = SmallModel();
  work.products = {{.weights = "bf16", .outputs = 100, .inputs = 10, .count = 8, .experts = 8, .chosen = 2}};
  EXPECT_NEAR(Whole(work).CostOf(PlanOf({Entry(9, 1)})).parts.weights_s, 2 * 1000e-9, 1e-15);
  // Two rows meet 8 (1 - (6/8)^2) = 3.5 experts, each with 8/7 rows.
  const StepParts parts = Whole(work).CostOf(PlanOf({Entry(9, 1), Entry(9, 1)})).parts;
  EXPECT_NEAR(parts.weights_s + parts.arithmetic_s, 3.5 * 1000 * (1 + 0.1 / 7) * 1e-9, 1e-15);
  EXPECT_EQ(Whole(work).weight_bytes(), 8 * 1000 * 2);
}

TEST(StepModel, AWindowLimitsWhatIsRead) {
  ModelWork work = SmallModel();
  proto::SoftmaxSpec spec = work.attention.softmax(LayerGroup(0));
  spec.window = 16;
  work.attention = *proto::AttentionTable::Build({spec, spec});
  EXPECT_NEAR(Whole(work).CostOf(PlanOf({Entry(99, 1)})).parts.attention_s, 2 * 16 * 256 / 1e9, 1e-15);
}

TEST(StepModel, StatesCostTheSameAtAnyLength) {
  ModelWork work = SmallModel();
  const proto::LinearSpec spec{
      .heads = 3, .key_dim = 64, .value_dim = 64, .delta = true, .token_decay = true, .token_rate = true};
  work.attention = *proto::AttentionTable::Build({spec}, {proto::LinearConstants{}});
  const auto model = StepModel::Create(work, SmallProfile(), std::nullopt);
  ASSERT_TRUE(model.ok()) << model.status();
  for (const Position ctx : {0, 1000}) {
    proto::StepEntry entry = Entry(ctx, 1);
    entry.placement = proto::WholePlacement(work.attention, WorkerId(0), Epoch(1));
    EXPECT_NEAR(model->CostOf(PlanOf({entry})).parts.attention_s, 3 * 64 * 64 * 1e-9, 1e-12) << ctx;
  }
}

TEST(StepModel, LinearLayersHaveAnOverheadOfTheirOwn) {
  ModelWork work = SmallModel();
  const proto::LinearSpec linear{
      .heads = 3, .key_dim = 64, .value_dim = 64, .delta = true, .token_decay = true, .token_rate = true};
  const proto::SoftmaxSpec softmax{.query_heads = 2, .kv_heads = 1, .key_dim = 64, .value_dim = 64, .scale = 1};
  work.attention = *proto::AttentionTable::Build({softmax, linear, linear}, {{}, proto::LinearConstants{}, {}});
  proto::StepEntry entry = Entry(0, 1);
  entry.placement = proto::WholePlacement(work.attention, WorkerId(0), Epoch(1));
  const auto overhead = [&](double linear_layer_s) {
    DeviceProfile profile = SmallProfile();
    profile.steps.linear_layer_s = linear_layer_s;
    return StepModel::Create(work, profile, std::nullopt)->CostOf(PlanOf({entry})).parts.overhead_s;
  };
  EXPECT_NEAR(overhead(5e-6) - overhead(0), 2 * 5e-6, 1e-12) << "two of three layers";
}

TEST(StepModel, WhatTheProfileLacksIsNotGuessed) {
  ModelWork work = SmallModel();
  work.products[0].weights = "fp4";
  EXPECT_THAT(std::string(StepModel::Create(work, SmallProfile(), std::nullopt).status().message()),
              HasSubstr("small: its profile has no products of fp4 weights"));
}

TEST(StepModel, TheLargestPartBinds) {
  StepParts parts;
  parts.link_s = 2;
  parts.weights_s = 1;
  EXPECT_STREQ(NameOf(LargestOf(parts)), "link");
}

}  // namespace
}  // namespace dovetail::plan
