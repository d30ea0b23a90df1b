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
using testing::The;
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
  const LaunchList after = {{0, NextNorm()}, {0, GatedExpertsRecord{ExpertGateUp(), ExpertActivation()}}, {0, Down()}};
  EXPECT_EQ(WordsOf(After(GateExperts(), before)), WordsOf(after));
}

TEST(GateExpertsRule, LeavesOtherActivationsAlone) {
  ExpertProductRecord product = ExpertGateUp();
  product.may_group = 0;
  ExpectStays(GateExperts(), product, ExpertActivation(), "tiles never have so many rows");
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
