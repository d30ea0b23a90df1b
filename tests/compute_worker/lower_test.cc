#include "compute_worker/cuda/lower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/compute_worker/launch_fixture.h"

namespace dovetail::compute {
namespace {

using testing::DenseLayer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kIntermediate;
using testing::NamesOf;
using testing::NormOf;
using testing::Shape;
using testing::SmallModel;
using testing::Softmax;
using testing::The;
using testing::WordsOf;

TEST(Lowering, MakesADenseLayerAListOfLaunches) {
  const auto list = DenseLayer().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list), ElementsAre("norm",                                       // 0
                                          "product", "before heads", "heads", "leave",  // 1
                                          "arrive", "product", "combine",               // 4
                                          "norm", "product", "gated activation", "product", "combine"));
  const auto& qkv = The<ProductRecord>(*list);
  EXPECT_EQ(qkv.x.tensor, Tensor::kH);
  EXPECT_EQ(qkv.y.tensor, Tensor::kQkv);
  EXPECT_EQ(qkv.w, (WeightName{Weight::kFirst, 1}));
  EXPECT_EQ(qkv.n, 128);
  EXPECT_EQ(qkv.k, kHidden);
  const auto& heads = The<HeadsRecord>(*list);
  EXPECT_EQ(heads.v_out, (Place{.tensor = Tensor::kKeyValue, .row = 32 * 2})) << "v lies behind k of all rows";
  EXPECT_EQ(heads.q_step + heads.k_step + heads.v_step, heads.qkv_step);
  EXPECT_EQ(heads.q_norm, WeightName{});
  const auto& down = The<ProductRecord>(*list, 3);
  EXPECT_EQ(down.k, kIntermediate);
  EXPECT_EQ(down.y.tensor, Tensor::kAside);
  const auto& sum = The<CombineRecord>(*list, 1);
  EXPECT_EQ(sum.a.tensor, Tensor::kX);
  EXPECT_EQ(sum.b.tensor, Tensor::kAside);
  EXPECT_EQ(sum.out.tensor, Tensor::kX);
}

TEST(Lowering, GivesTheSameListForTheSameSteps) {
  const auto once = DenseLayer().Lowered(), again = DenseLayer().Lowered();
  ASSERT_TRUE(once.ok() && again.ok());
  EXPECT_EQ(WordsOf(*once), WordsOf(*again));
}

TEST(Lowering, NormsHeadsTogetherByThemselvesAndEachHeadOnItsWay) {
  SmallModel small = DenseLayer();
  std::get<model::QueryProjection>(small.steps[1]).head_norm = NormOf(64);     // all heads
  std::get<model::KeyValueProjection>(small.steps[2]).head_norm = NormOf(16);  // each
  const auto list = small.Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list, 1), ElementsAre("product", "norm", "before heads", "heads", "leave"));
  EXPECT_EQ(The<NormRecord>(*list, 1).w, (WeightName{Weight::kQNorm, 1}));
  EXPECT_EQ(The<NormRecord>(*list, 1).x_step, 128);
  EXPECT_EQ(The<HeadsRecord>(*list).q_norm, WeightName{});
  EXPECT_EQ(The<HeadsRecord>(*list).k_norm, (WeightName{Weight::kKNorm, 1}));
}

TEST(Lowering, NormsAndScalesWhatIsAddedAside) {
  SmallModel small = DenseLayer();
  auto& output = std::get<model::OutputProjection>(small.steps[4]);
  output.post_norm = NormOf(kHidden);
  output.scale = 0.5f;
  const auto list = small.Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list, 4), ElementsAre("arrive", "product", "norm", "combine"));
  EXPECT_EQ(The<NormRecord>(*list, 1).out.tensor, Tensor::kAside);
  EXPECT_EQ(The<CombineRecord>(*list).b_factor, 0.5f);
}

TEST(Lowering, BeginsTheResidualStreamAnew) {
  SmallModel small = DenseLayer();
  small.steps[0] = model::InputNorm{.restart = 2.0f};
  const auto list = small.Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list, 0), ElementsAre("combine", "combine"));
  EXPECT_EQ(The<CombineRecord>(*list, 0).out.tensor, Tensor::kH);
  EXPECT_EQ(The<CombineRecord>(*list, 1).out.tensor, Tensor::kX);
  EXPECT_EQ(The<CombineRecord>(*list, 1).a_factor, 2.0f);
}

SmallModel StateLayer() {
  SmallModel small;
  small.ops = {proto::LinearSpec{.heads = 2, .key_dim = 8, .value_dim = 16, .token_decay = true, .token_rate = true}};
  small.Add(model::InputNorm{.norm = NormOf(kHidden)});
  small.Add(model::QueryProjection{.op = 0, .silu = true}, {{Weight::kFirst, {64, kHidden}},
                                                            {Weight::kDecay, {2, 16}},
                                                            {Weight::kDecayLow, {16, kHidden}},
                                                            {Weight::kRate, {2, kHidden}}});
  model::KeyValueProjection keys{.op = 0, .silu = true};
  keys.gates.emplace();
  keys.gates->rate = Shape(2, kHidden);
  small.Add(std::move(keys));
  small.Add(model::AttentionCut{0});
  model::OutputProjection output{.op = 0};
  output.gate.emplace();
  output.gate->norm = NormOf(16);
  small.Add(std::move(output), {{Weight::kFirst, {kHidden, 32}}});
  return small;
}

TEST(Lowering, MakesWhatGoesIntoALinearStateFromTheLayersInput) {
  const auto list = StateLayer().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list, 0), ElementsAre("norm", "copy"));
  EXPECT_THAT(NamesOf(*list, 1), ElementsAre("before heads", "product", "state inputs", "product", "product", "product",
                                             "state gates", "leave"));
  EXPECT_THAT(NamesOf(*list, 4), ElementsAre("arrive", "output gate", "product", "combine"));
  EXPECT_EQ(The<ProductRecord>(*list).x.tensor, Tensor::kInput);
  EXPECT_EQ(The<ProductRecord>(*list, 1).w.weight, Weight::kDecayLow);
  EXPECT_EQ(The<ProductRecord>(*list, 2).x.tensor, Tensor::kLow);
  EXPECT_EQ(The<StateGatesRecord>(*list).out, (Place{.tensor = Tensor::kKeyValue, .align = 4, .row = 96}));
  EXPECT_EQ(The<OutputGateRecord>(*list).size, 16);
  EXPECT_EQ(The<ProductRecord>(*list, 4).x.tensor, Tensor::kGated);
}

TEST(Lowering, RefusesANormThatDoesNotDivideWhatWasAttended) {
  SmallModel small = StateLayer();
  std::get<model::OutputProjection>(small.steps[4]).gate->norm = NormOf(24);
  const absl::Status status = small.Lowered().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("does not divide 32"));
}

TEST(Lowering, ExpandsKeysAndValuesOfALatent) {
  SmallModel small = DenseLayer();
  model::LatentKeyValue latent{.norm = NormOf(24), .heads = 2, .own = 12, .shared = 4};
  std::get<model::KeyValueProjection>(small.steps[2]).latent = std::move(latent);
  small.shapes[{1, Weight::kFirst}] = {64, kHidden};
  small.shapes[{1, Weight::kLatentDown}] = {28, kHidden};
  small.shapes[{1, Weight::kLatentK}] = {24, 24};
  small.shapes[{1, Weight::kLatentV}] = {32, 24};
  const auto list = small.Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list, 1), ElementsAre("product", "product", "norm", "product", "join keys", "product",
                                             "before heads", "heads", "leave"));
  EXPECT_EQ(The<ProductRecord>(*list).y_step, 128) << "q lies in rows of q, k and v";
  EXPECT_EQ(The<JoinKeysRecord>(*list).shared, (Place{.tensor = Tensor::kLatent, .at = 48}));
  EXPECT_EQ(The<ProductRecord>(*list, 3).y, (Place{.tensor = Tensor::kQkv, .at = 2 * 96}));
}

SmallModel ExpertLayer(bool latent, bool shared_gate) {
  SmallModel small;
  small.ops = {Softmax()};  // no table is without
  model::ExpertMlp experts{.norm = NormOf(kHidden), .chosen = 2, .experts = std::vector<model::ExpertMlp::Expert>(4)};
  experts.shared.emplace();
  if (latent) experts.latent_down = Shape(16, kHidden);
  if (shared_gate) experts.shared_gate = Shape(1, kHidden);
  small.Add(std::move(experts), {{Weight::kExpertGateUp, {4 * 48, 16}},
                                 {Weight::kExpertDown, {4 * 64, 24}},
                                 {Weight::kExpertsLatentDown, {16, kHidden}},
                                 {Weight::kExpertsLatentUp, {kHidden, 16}},
                                 {Weight::kSharedGateUp, {80, kHidden}},
                                 {Weight::kSharedDown, {kHidden, 40}}});
  return small;
}

TEST(Lowering, RoutesBeforeTheNormAndSumsExperts) {
  const auto list = ExpertLayer(false, false).Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list), ElementsAre("route", "place", "norm", "expert product", "activation", "expert product",
                                          "expert sum", "product", "activation", "product", "combine"));
}

TEST(Lowering, TellsPlacesAndBothProductsThatExpertsAreKept) {
  SmallModel small = ExpertLayer(false, false);
  small.shapes[{0, Weight::kExpertDown}].kept = true;
  const auto list = small.Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(The<PlaceExpertsRecord>(*list).kept, 1);
  EXPECT_EQ(The<ExpertProductRecord>(*list).kept, 1) << "tiles are those of the other product";
  EXPECT_EQ(The<ExpertProductRecord>(*list, 1).kept, 1);
}

TEST(Lowering, GatesTheSharedExpertAndTakesALatentThere) {
  const auto list = ExpertLayer(true, true).Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_THAT(NamesOf(*list), ElementsAre("route", "place", "norm", "product", "expert product", "activation",
                                          "expert product", "clear", "expert sum", "combine", "product", "combine",
                                          "product", "activation", "product", "gated add"));
  EXPECT_EQ(The<ExpertSumRecord>(*list).out.tensor, Tensor::kExpertsLatentSum);
  EXPECT_EQ(The<ExpertProductRecord>(*list).n, 48);
  EXPECT_EQ(The<ExpertProductRecord>(*list, 1).n, 64);
  EXPECT_EQ(The<MlpActivationRecord>(*list).times, 2);
}

TEST(Lowering, NamesQueriesWithoutKeysAndWhatOnlyStatesHave) {
  SmallModel small = DenseLayer();
  small.steps.resize(2);
  EXPECT_EQ(small.Lowered().status().code(), absl::StatusCode::kInternal);
  small = DenseLayer();
  std::get<model::KeyValueProjection>(small.steps[2]).silu = true;
  EXPECT_EQ(small.Lowered().status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace dovetail::compute
