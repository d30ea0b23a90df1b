#include "compute_worker/cuda/fuse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/compute_worker/launch_fixture.h"

namespace dovetail::compute {
namespace {

using testing::DenseLayer;
using ::testing::ElementsAre;
using testing::kHidden;
using testing::kIntermediate;
using testing::NamesOf;
using testing::SmallModel;
using testing::WordsOf;

constexpr Place kX = {.tensor = Tensor::kX}, kH = {.tensor = Tensor::kH}, kAside = {.tensor = Tensor::kAside};
constexpr Place kGateUp = {.tensor = Tensor::kGateUp}, kAct = {.tensor = Tensor::kAct};

ProductRecord Down() {
  return {.x = kAct,
          .y = kAside,
          .w = {Weight::kSecond, 0},
          .n = kHidden,
          .k = kIntermediate,
          .y_step = kHidden,
          .result = ProductResult::kF32};
}
CombineRecord Sum() { return {.a = kX, .b = kAside, .out = kX, .width = kHidden}; }
ProductRecord AddedDown() {
  ProductRecord down = Down();
  down.y = kX;
  down.result = ProductResult::kAdded;
  return down;
}
NormRecord NextNorm() {
  return {.x = kX, .out = kH, .w = {Weight::kNorm, 1}, .x_step = kHidden, .out_step = kHidden, .size = kHidden};
}
ProductRecord GateUp() {
  return {.x = kH,
          .y = kGateUp,
          .w = {Weight::kFirst, 0},
          .n = 2 * kIntermediate,
          .k = kHidden,
          .y_step = 2 * kIntermediate};
}
GatedActivationRecord Activation() { return {.gate_up = kGateUp, .out = kAct, .size = kIntermediate}; }

const FusionRule& Rule(std::string_view name) {
  for (const FusionRule& rule : FusionRules())
    if (rule.name == name) return rule;
  ADD_FAILURE() << "no rule: " << name;
  return FusionRules()[0];
}
const FusionRule& SumIntoX() { return Rule("a product adds to x"); }
const FusionRule& SumInNorm() { return Rule("the next norm sums a product's parts"); }
const FusionRule& GateProduct() { return Rule("a gated MLP's first half is one kernel"); }
const FusionRule& GateExperts() { return Rule("the first half of gated experts is one kernel"); }
const FusionRule& NormInRoute() { return Rule("a router leaves the row that it has normed"); }
const FusionRule& PairExperts() { return Rule("few rows' experts are multiplied pair by pair"); }

// `list` after this rule alone.
LaunchList After(const FusionRule& rule, LaunchList list, int parts = 2) {
  return Fuse(std::move(list), {.parts = parts}, std::span(&rule, 1));
}

// That the rule leaves these two alone.
template <typename First, typename Second>
void ExpectStays(const FusionRule& rule, const First& first, const Second& second, const char* why, int parts = 2) {
  const LaunchList list = {{0, first}, {1, second}};
  EXPECT_EQ(WordsOf(After(rule, list, parts)), WordsOf(list)) << why;
}

TEST(SumIntoXRule, LetsAProductAdd) {
  const LaunchList before = {{0, GateUp()}, {0, Down()}, {0, Sum()}, {1, NextNorm()}};
  const LaunchList after = {{0, GateUp()}, {0, AddedDown()}, {1, NextNorm()}};
  EXPECT_EQ(WordsOf(After(SumIntoX(), before)), WordsOf(after));
}

TEST(SumIntoXRule, LeavesOtherSumsAlone) {
  CombineRecord sum = Sum();
  sum.b_factor = 0.5f;
  ExpectStays(SumIntoX(), Down(), sum, "a scaled one");
  sum = Sum();
  sum.a_factor = 2.0f;
  ExpectStays(SumIntoX(), Down(), sum, "x is scaled");
  sum = Sum();
  sum.out = kH;
  ExpectStays(SumIntoX(), Down(), sum, "the sum goes elsewhere");
  sum = Sum();
  sum.b = {.tensor = Tensor::kExpertsAside};
  ExpectStays(SumIntoX(), Down(), sum, "of another product");
  ProductRecord wire = Down();
  wire.result = ProductResult::kWire;
  ExpectStays(SumIntoX(), wire, Sum(), "one that was rounded");
  NormRecord post = NextNorm();
  post.x = post.out = kAside;
  const LaunchList normed = {{0, Down()}, {0, post}, {0, Sum()}};
  EXPECT_EQ(WordsOf(After(SumIntoX(), normed)), WordsOf(normed)) << "a norm lies between";
}

TEST(SumInNormRule, LeavesPartsForTheNextNorm) {
  ProductRecord parts = AddedDown();
  parts.y = {.tensor = Tensor::kParts};
  parts.result = ProductResult::kF32;
  parts.parts = 2;
  NormRecord norm = NextNorm();
  norm.parts = 2;
  EXPECT_EQ(WordsOf(After(SumInNorm(), {{0, AddedDown()}, {1, NextNorm()}})), WordsOf({{0, parts}, {1, norm}}));
}

TEST(SumInNormRule, LeavesOtherProductsAndNormsAlone) {
  ExpectStays(SumInNorm(), AddedDown(), NextNorm(), "products of so many rows leave no parts", /*parts=*/1);
  ProductRecord product = AddedDown();
  product.kept = 1;
  ExpectStays(SumInNorm(), product, NextNorm(), "weights in few bits");
  product = AddedDown();
  product.biased = 1;
  ExpectStays(SumInNorm(), product, NextNorm(), "a bias would be added twice");
  product = AddedDown();
  product.k = 24;
  ExpectStays(SumInNorm(), product, NextNorm(), "its columns do not divide into runs of 16 bytes");
  product = AddedDown();
  product.w.weight = Weight::kSharedDown;
  ExpectStays(SumInNorm(), product, NextNorm(), "experts add by themselves");
  ExpectStays(SumInNorm(), Down(), NextNorm(), "a product that does not add");
  NormRecord norm = NextNorm();
  norm.x = kAside;
  ExpectStays(SumInNorm(), AddedDown(), norm, "a norm of something else");
  ExpectStays(SumInNorm(), AddedDown(), CombineRecord{.a = kX, .out = kH, .width = kHidden}, "no norm follows");
  const LaunchList routed = {{0, AddedDown()}, {1, RouteRecord{.x = kX}}, {1, NextNorm()}};
  EXPECT_EQ(WordsOf(After(SumInNorm(), routed)), WordsOf(routed)) << "a router reads x before";
}

TEST(GateProductRule, MakesProductAndActivationOneLaunch) {
  const LaunchList before = {{0, NextNorm()}, {0, GateUp()}, {0, Activation()}, {0, Down()}};
  const LaunchList after = {{0, NextNorm()}, {0, GatedProductRecord{GateUp(), Activation()}}, {0, Down()}};
  EXPECT_EQ(WordsOf(After(GateProduct(), before)), WordsOf(after));
}

TEST(GateProductRule, LeavesOtherActivationsAlone) {
  ProductRecord product = GateUp();
  product.kept = 1;
  ExpectStays(GateProduct(), product, Activation(), "weights in few bits");
  product = GateUp();
  product.biased = 1;
  ExpectStays(GateProduct(), product, Activation(), "the kernel adds no bias");
  GatedActivationRecord activation = Activation();
  activation.gate_up = {.tensor = Tensor::kPairGateUp};
  ExpectStays(GateProduct(), GateUp(), activation, "of another product");
  ExpectStays(GateProduct(), GateUp(), MlpActivationRecord{.gate_up = kGateUp, .out = kAct, .size = kIntermediate},
              "another activation");
}

ExpertProductRecord ExpertGateUp() {
  return {.x = kH,
          .member = {.tensor = Tensor::kMember},
          .y = {.tensor = Tensor::kPairGateUp},
          .tiles = {.tensor = Tensor::kTiles},
          .w = {Weight::kExpertGateUp, 0},
          .n = 2 * kIntermediate,
          .k = kHidden,
          .may_group = 1,
          .experts = 4,
          .chosen = 2};
}
MlpActivationRecord ExpertActivation() {
  return {.gate_up = {.tensor = Tensor::kPairGateUp},
          .out = {.tensor = Tensor::kPairAct},
          .size = kIntermediate,
          .times = 2};
}

TEST(GateExpertsRule, MakesProductAndActivationOneLaunch) {
  const LaunchList before = {{0, NextNorm()}, {0, ExpertGateUp()}, {0, ExpertActivation()}, {0, Down()}};
  const LaunchList after = {
      {0, NextNorm()}, {0, GatedExpertsRecord{ExpertGateUp(), ExpertActivation(), {}}}, {0, Down()}};
  EXPECT_EQ(WordsOf(After(GateExperts(), before)), WordsOf(after));
}

TEST(GateExpertsRule, LeavesOtherActivationsAlone) {
  ExpertProductRecord product = ExpertGateUp();
  product.may_group = 0;
  ExpectStays(GateExperts(), product, ExpertActivation(), "tiles never have so many rows");
  product.kept = 1;
  EXPECT_EQ(After(GateExperts(), {{0, product}, {0, ExpertActivation()}}).size(), 1u) << "few rows read codes";
  product = ExpertGateUp();
  product.n = kIntermediate;
  ExpectStays(GateExperts(), product, ExpertActivation(), "there is no gate");
  MlpActivationRecord activation = ExpertActivation();
  activation.kind = kernels::cuda::MlpKind::kClampedSwiglu;
  ExpectStays(GateExperts(), ExpertGateUp(), activation, "the kernel has no such activation");
  activation = ExpertActivation();
  activation.gate_up = {.tensor = Tensor::kGateUp};
  ExpectStays(GateExperts(), ExpertGateUp(), activation, "of another product");
  activation = ExpertActivation();
  activation.times = 1;
  ExpectStays(GateExperts(), ExpertGateUp(), activation, "of other rows");
}

RouteRecord Router() { return {.x = kX, .norm = {Weight::kNorm, 1}, .hidden = kHidden, .experts = 4, .chosen = 2}; }
PlaceExpertsRecord Places() {
  return {.expert = {.tensor = Tensor::kChosen},
          .slot = {.tensor = Tensor::kSlot},
          .member = {.tensor = Tensor::kMember},
          .tiles = {.tensor = Tensor::kTiles},
          .experts = 4,
          .chosen = 2,
          .may_group = 1};
}

TEST(NormInRouteRule, LetsTheRouterLeaveItsRow) {
  RouteRecord leaves = Router();
  leaves.h = kH;
  const LaunchList before = {{1, Router()}, {1, Places()}, {1, NextNorm()}, {1, ExpertGateUp()}};
  EXPECT_EQ(WordsOf(After(NormInRoute(), before)), WordsOf({{1, leaves}, {1, Places()}, {1, ExpertGateUp()}}));
}

TEST(NormInRouteRule, LeavesOtherNormsAlone) {
  const auto stays = [](const NormRecord& norm, const char* why) {
    const LaunchList list = {{1, Router()}, {1, Places()}, {1, norm}};
    EXPECT_EQ(WordsOf(After(NormInRoute(), list)), WordsOf(list)) << why;
  };
  NormRecord norm = NextNorm();
  norm.w.step = 2;
  stays(norm, "other weights");
  norm = NextNorm();
  norm.x = kAside;
  stays(norm, "another row");
  norm = NextNorm();
  norm.eps = 1e-3f;
  stays(norm, "another epsilon");
  norm = NextNorm();
  norm.out_step = 2 * kHidden;
  stays(norm, "rows that do not follow each other");
  norm = NextNorm();
  norm.parts = 2;
  stays(norm, "parts of x are still to be summed");
  norm = NextNorm();
  norm.out_type = WireType::kF32;
  stays(norm, "a router leaves 16 bits");
}

ExpertProductRecord ExpertDown() {
  return {.x = {.tensor = Tensor::kPairAct},
          .y = {.tensor = Tensor::kPairOut},
          .tiles = {.tensor = Tensor::kTiles},
          .w = {Weight::kExpertDown, 0},
          .n = kHidden,
          .k = kIntermediate,
          .may_group = 1,
          .experts = 4,
          .chosen = 2,
          .y_is_f32 = 1};
}
ExpertSumRecord ExpertSum() {
  return {.y = {.tensor = Tensor::kPairOut},
          .slot = {.tensor = Tensor::kSlot},
          .weight = {.tensor = Tensor::kRouteWeight},
          .out = kX,
          .size = kHidden,
          .chosen = 2};
}

TEST(PairExpertsRule, LetsFewRowsDoWithoutPlaces) {
  const GatedExpertsRecord gated{ExpertGateUp(), ExpertActivation(), {}};
  PlaceExpertsRecord places = Places();
  places.may_pair = 1;
  const LaunchList before = {{0, Places()}, {0, gated}, {0, ExpertDown()}, {0, ExpertSum()}, {0, NextNorm()}};
  const LaunchList after = {{0, places},
                            {0, GatedExpertsRecord{ExpertGateUp(), ExpertActivation(), places.expert}},
                            {0, SummedExpertsRecord{ExpertDown(), ExpertSum(), places.expert}},
                            {0, NextNorm()}};
  EXPECT_EQ(WordsOf(After(PairExperts(), before)), WordsOf(after));
}

TEST(PairExpertsRule, LeavesPlacesToExpertsInFewBits) {
  PlaceExpertsRecord places = Places();
  places.kept = 1;
  const GatedExpertsRecord gated{ExpertGateUp(), ExpertActivation(), {}};
  const LaunchList before = {{0, places}, {0, gated}, {0, ExpertDown()}, {0, ExpertSum()}};
  const LaunchList after = {{0, places}, {0, gated}, {0, SummedExpertsRecord{ExpertDown(), ExpertSum(), {}}}};
  EXPECT_EQ(WordsOf(After(PairExperts(), before)), WordsOf(after));
}

TEST(PairExpertsRule, LeavesPlacesWhereSumsAreMadeInOneOrder) {
  const GatedExpertsRecord gated{ExpertGateUp(), ExpertActivation(), {}};
  const LaunchList before = {{0, Places()}, {0, gated}, {0, ExpertDown()}, {0, ExpertSum()}};
  const LaunchList after = {{0, Places()}, {0, gated}, {0, SummedExpertsRecord{ExpertDown(), ExpertSum(), {}}}};
  EXPECT_EQ(WordsOf(Fuse(before, {.parts = 2, .in_order = true}, std::span(&PairExperts(), 1))), WordsOf(after));
}

TEST(PairExpertsRule, LeavesWhatItDoesNotKnowAlone) {
  const auto stays = [](const ExpertProductRecord& product, const ExpertSumRecord& sum, const char* why) {
    const GatedExpertsRecord gated{ExpertGateUp(), ExpertActivation(), {}};
    const LaunchList list = {{0, Places()}, {0, gated}, {0, product}, {0, sum}};
    EXPECT_EQ(WordsOf(After(PairExperts(), list)), WordsOf(list)) << why;
  };
  ExpertProductRecord product = ExpertDown();
  product.x = kAct;
  stays(product, ExpertSum(), "a product of something else");
  product = ExpertDown();
  product.y_is_f32 = 0;
  stays(product, ExpertSum(), "a product that is rounded before it is summed");
  ExpertSumRecord sum = ExpertSum();
  sum.y = kAside;
  stays(ExpertDown(), sum, "a sum of something else");
  const LaunchList ungated = {{0, Places()}, {0, ExpertGateUp()}, {0, ExpertDown()}, {0, ExpertSum()}};
  EXPECT_EQ(WordsOf(After(PairExperts(), ungated)), WordsOf(ungated)) << "no activation with the product";
}

SmallModel TwoLayers() {
  SmallModel small = DenseLayer();
  SmallModel second = DenseLayer();
  for (size_t i = 0; i < second.steps.size(); ++i) {
    const int index = small.Add(std::move(second.steps[i]));
    for (const Weight weight : {Weight::kFirst, Weight::kSecond})
      if (const auto it = second.shapes.find({static_cast<int>(i), weight}); it != second.shapes.end())
        small.shapes[{index, weight}] = it->second;
  }
  return small;
}

TEST(Fusion, LeavesADenseLayerAsFewLaunchesAsKernelsAllow) {
  const auto list = TwoLayers().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  const LaunchList fused = Fuse(*list, {.parts = 1});
  EXPECT_THAT(NamesOf(fused, 4), ElementsAre("arrive", "product"));
  EXPECT_THAT(NamesOf(fused, 5), ElementsAre("norm", "gated product", "product"));
  for (const Launch& launch : fused)
    if (const auto* const norm = std::get_if<NormRecord>(&launch.record)) {
      EXPECT_EQ(norm->parts, 0);
    }
}

TEST(Fusion, HandsPartsFromStepToStepButNotFromTheLast) {
  const auto list = TwoLayers().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  const LaunchList fused = Fuse(*list, {.parts = 2});
  std::vector<int> parts;  // of the norms
  for (const Launch& launch : fused)
    if (const auto* const norm = std::get_if<NormRecord>(&launch.record)) parts.push_back(norm->parts);
  EXPECT_THAT(parts, ElementsAre(0, 2, 2, 2));
  const auto& last = std::get<ProductRecord>(fused.back().record);
  EXPECT_EQ(last.y, kX) << "what draws tokens reads x";
  EXPECT_EQ(last.parts, 1);
}

TEST(Fusion, ChangesNothingWhenItIsDoneAgain) {
  const auto list = TwoLayers().Lowered();
  ASSERT_TRUE(list.ok()) << list.status();
  for (const int parts : {1, 2}) {
    const LaunchList once = Fuse(*list, {.parts = parts});
    EXPECT_EQ(WordsOf(Fuse(once, {.parts = parts})), WordsOf(once));
  }
}

}  // namespace
}  // namespace dovetail::compute
