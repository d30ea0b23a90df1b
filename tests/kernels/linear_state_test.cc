#include "kernels/linear_state.h"

#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <tuple>

#include "gtest/gtest.h"
#include "kernels/affine_span.h"
#include "kernels/reference/linear_state.h"
#include "tests/kernels/linear_state_fixture.h"

namespace dovetail::kernels::testing {
namespace {

class LinearStateOf : public ::testing::TestWithParam<Family> {
 protected:
  const Family& family() const { return GetParam(); }
};

// Largest difference over the largest value.
double RelativeError(const std::vector<float>& values, const std::vector<double>& expected) {
  double worst = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(values[i])) return INFINITY;
    worst = std::max(worst, std::abs(values[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return worst / largest;
}

TEST_P(LinearStateOf, TheBlockedFormEqualsThePlainRecurrence) {
  for (const auto& [keys, values] : {std::pair{16, 16}, {12, 24}, {32, 32}, {64, 128}, {128, 64}, {1, 1}, {33, 7}}) {
    const TokenStream stream(family(), keys, values, 330, 17);
    std::vector<double> state(keys * values, 0.0);
    const std::vector<double> expected = reference::LinearState(stream.shape, stream.Tokens(), state);
    for (const Isa isa : TestableIsas()) {
      StateMemory memory(stream.shape);
      const std::vector<float> o = RunTokens(isa, stream, memory, {330});
      EXPECT_LT(RelativeError(o, expected), family().budget) << keys << " x " << values;
    }
  }
}

TEST_P(LinearStateOf, BitsDependOnNeitherChunkingNorIsa) {
  const TokenStream stream(family(), 32, 48, 300, 3);
  StateMemory whole_memory(stream.shape);
  const std::vector<float> whole = RunTokens(Isa::kAvx2, stream, whole_memory, {300});
  std::mt19937 random(11);
  for (int round = 0; round < 12; ++round) {
    std::vector<int> chunks;
    for (int left = 300; left > 0; left -= chunks.back()) {
      const int most = round == 0 ? 1 : round < 4 ? 16 : 200;
      chunks.push_back(std::min(left, 1 + static_cast<int>(random() % most)));
    }
    for (const Isa isa : TestableIsas()) {
      StateMemory memory(stream.shape);
      ASSERT_EQ(RunTokens(isa, stream, memory, chunks), whole) << "round " << round;
      EXPECT_EQ(memory.StateAfterBlock(3), whole_memory.StateAfterBlock(3));
    }
  }
}

TEST_P(LinearStateOf, BitsOfAStateInBF16DependOnNeitherChunkingNorIsa) {
  TokenStream stream(family(), 40, 48, 300, 4);
  stream.shape.state = DType::kBF16;
  StateMemory whole_memory(stream.shape);
  const std::vector<float> whole = RunTokens(Isa::kAvx2, stream, whole_memory, {300});
  for (const Isa isa : TestableIsas()) {
    for (const int rows : {1, 7, 64, 130}) {
      std::vector<int> chunks;
      for (int left = 300; left > 0; left -= chunks.back()) chunks.push_back(std::min(left, rows));
      StateMemory memory(stream.shape);
      ASSERT_EQ(RunTokens(isa, stream, memory, chunks), whole) << rows << " tokens a step";
    }
    StateMemory memory(stream.shape);  // each step twice
    std::vector<float> o(whole.size());
    for (int64_t at = 0; at < 300; at += 20)
      for (int times = 0; times < 2; ++times) RunRows(isa, stream, memory, at, 20, o);
    EXPECT_EQ(o, whole);
  }
}

TEST_P(LinearStateOf, ARepeatedStepChangesNothing) {
  const TokenStream stream(family(), 32, 32, 200, 5);
  StateMemory memory(stream.shape), once(stream.shape);
  const std::vector<float> expected = RunTokens(TestableIsas().back(), stream, once, {200});
  std::vector<float> o(expected.size());
  int64_t at = 0;
  for (const int rows : {50, 30, 1, 60, 16, 43}) {  // crosses boundaries with and without tokens before
    for (int times = 0; times < 3; ++times) RunRows(TestableIsas().back(), stream, memory, at, rows, o);
    at += rows;
  }
  EXPECT_EQ(o, expected);
}

TEST_P(LinearStateOf, TokensTakenBackLeaveNoTrace) {
  const TokenStream stream(family(), 32, 32, 200, 5), other(family(), 32, 32, 200, 6);
  StateMemory memory(stream.shape), once(stream.shape);
  const std::vector<float> expected = RunTokens(TestableIsas().back(), stream, once, {200});
  std::vector<float> o(expected.size()), ignored(expected.size());
  for (int64_t at = 0; at < 200; at += 10) {  // guesses run up to 16 tokens ahead and are dropped
    RunRows(TestableIsas().back(), other, memory, at, std::min<int>(16, 200 - at), ignored);
    RunRows(TestableIsas().back(), stream, memory, at, 10, o);
  }
  EXPECT_EQ(o, expected);
}

TEST_P(LinearStateOf, PiecesOfAnySizeHoldTheSameState) {
  const TokenStream stream(family(), 48, 32, 150, 8);
  StateMemory whole(stream.shape);
  const std::vector<float> expected = RunTokens(TestableIsas().back(), stream, whole, {150});
  for (const size_t piece : {size_t{256}, size_t{1024}, size_t{4096 + 64}, size_t{10000 / 64 * 64}}) {
    StateMemory memory(stream.shape, piece);
    EXPECT_EQ(RunTokens(TestableIsas().back(), stream, memory, {70, 80}), expected) << piece;
  }
}

// In one call decode fetches from head to head; some of these heads have no state yet, or a block that begins or ends.
TEST_P(LinearStateOf, ManyHeadsOfOneCallGiveTheBitsOfEachAlone) {
  for (const auto& [keys, values, type] :
       {std::tuple{32, 48, DType::kF32}, {128, 128, DType::kF32}, {40, 192, DType::kBF16}}) {
    TokenStream stream(family(), keys, values, 300, 12);
    stream.shape.state = type;
    for (const Isa isa : TestableIsas()) {
      StateMemory alone(stream.shape);
      const std::vector<float> expected = RunTokens(isa, stream, alone, {300});
      const int64_t positions[] = {0, 1, 63, 64, 65, 100, 126, 127, 128, 191, 200, 255, 256, 290};
      constexpr int kRows[] = {1, 2, 1, 5, 1};
      ThreadPool pool({.threads = 1});
      const OpContext context{&pool, &SelectOps(isa)};
      std::vector<std::unique_ptr<StateMemory>> memories;
      std::vector<LinearStateItem> items;
      std::vector<float> ignored(expected.size());
      std::vector<std::vector<float>> out;
      for (int head = 0; head < 28; ++head) {
        const int64_t at = positions[head % std::size(positions)];
        const int rows = kRows[head % std::size(kRows)];
        memories.push_back(std::make_unique<StateMemory>(stream.shape));
        if (at > 0) RunRows(isa, stream, *memories.back(), 0, static_cast<int>(at), ignored);
        out.emplace_back(rows * values);
        items.push_back(memories.back()->Attach(stream.Item(at, rows), at, out.back().data(), values));
      }
      std::vector<std::byte> scratch(LinearStateScratchBytes(stream.shape, items));
      ASSERT_TRUE(LinearState(context, stream.shape, items, scratch).ok());
      for (size_t head = 0; head < items.size(); ++head) {
        const auto from = expected.begin() + items[head].first_position * values;
        EXPECT_EQ(out[head], std::vector<float>(from, from + items[head].rows * values))
            << keys << " x " << values << ", head " << head << " at " << items[head].first_position;
      }
    }
  }
}

TEST_P(LinearStateOf, BlocksThatAreNotKeptGoThroughScratch) {
  const TokenStream stream(family(), 32, 32, 300, 9);
  StateMemory whole(stream.shape), sparse(stream.shape), last(stream.shape);
  const std::vector<float> expected = RunTokens(TestableIsas().back(), stream, whole, {300});
  sparse.Drop({2});
  EXPECT_EQ(RunTokens(TestableIsas().back(), stream, sparse, {100, 200}), expected);
  EXPECT_EQ(sparse.StateAfterBlock(3), whole.StateAfterBlock(3));
  last.Drop({0, 1, 2});
  EXPECT_EQ(RunTokens(TestableIsas().back(), stream, last, {300}), expected);
  EXPECT_EQ(last.StateAfterBlock(3), whole.StateAfterBlock(3));
}

TEST_P(LinearStateOf, AStateInBF16StaysWithinItsBudget) {
  TokenStream stream(family(), 64, 64, 512, 21);
  std::vector<double> state(64 * 64, 0.0);
  const std::vector<double> expected = reference::LinearState(stream.shape, stream.Tokens(), state);
  stream.shape.state = DType::kBF16;
  StateMemory memory(stream.shape);
  const std::vector<float> o = RunTokens(TestableIsas().back(), stream, memory, {512});
  const double error = RelativeError(o, expected);
  EXPECT_LT(error, 4.5e-3);  // measured: 8.4e-4 to 2.1e-3
  EXPECT_GT(error, 1e-5);    // it does round
}

TEST_P(LinearStateOf, SpansComposeInAnyGrouping) {
  const TokenStream stream(family(), 24, 40, 160, 13);
  std::mt19937 random(5);
  const AffineSpan whole = AffineSpan::Of(stream.shape, stream.Item(0, 160)).value();
  for (int round = 0; round < 8; ++round) {
    int a = random() % 161, b = random() % 161;
    if (a > b) std::swap(a, b);
    const AffineSpan one = AffineSpan::Of(stream.shape, stream.Item(0, a)).value();
    const AffineSpan two = AffineSpan::Of(stream.shape, stream.Item(a, b - a)).value();
    const AffineSpan three = AffineSpan::Of(stream.shape, stream.Item(b, 160 - b)).value();
    const AffineSpan left = AffineSpan::Compose(AffineSpan::Compose(one, two).value(), three).value();
    const AffineSpan right = AffineSpan::Compose(one, AffineSpan::Compose(two, three).value()).value();
    for (const AffineSpan* span : {&left, &right}) {
      const std::vector<double> state(whole.state().begin(), whole.state().end());
      EXPECT_LT(RelativeError({span->state().begin(), span->state().end()}, state), 1e-6);
      const std::vector<double> transition(whole.transition().begin(), whole.transition().end());
      if (*std::max_element(transition.begin(), transition.end()) > 1e-30) {
        EXPECT_LT(RelativeError({span->transition().begin(), span->transition().end()}, transition), 1e-6);
      }
    }
  }
}

TEST_P(LinearStateOf, ASpanAppliedToTheStateBeforeItGivesTheStateAfterIt) {
  const TokenStream stream(family(), 32, 32, 192, 14);
  StateMemory memory(stream.shape);
  RunTokens(TestableIsas().back(), stream, memory, {192});
  std::vector<float> state = memory.StateAfterBlock(0);
  const AffineSpan rest = AffineSpan::Of(stream.shape, stream.Item(64, 128)).value();
  rest.Apply(state, state);
  const std::vector<float> expected = memory.StateAfterBlock(2);
  EXPECT_LT(RelativeError(state, {expected.begin(), expected.end()}), family().budget);
}

INSTANTIATE_TEST_SUITE_P(Families, LinearStateOf, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AffineSpan, TheEmptySpanIsNeutral) {
  for (const Family& family : kFamilies) {
    const TokenStream stream(family, 8, 8, 20, 1);
    const AffineSpan span = AffineSpan::Of(stream.shape, stream.Item(0, 20)).value();
    const AffineSpan empty = AffineSpan::Identity(stream.shape).value();
    for (const auto& both : {AffineSpan::Compose(empty, span).value(), AffineSpan::Compose(span, empty).value()}) {
      EXPECT_TRUE(std::ranges::equal(both.state(), span.state())) << family.name;
      EXPECT_TRUE(std::ranges::equal(both.transition(), span.transition())) << family.name;
    }
  }
}

TEST(AffineSpan, PartsThatDoNotFitAreRefused) {
  const LinearStateShape delta{8, 4, DecayForm::kScalar, StateUpdate::kDelta};
  EXPECT_FALSE(AffineSpan::FromParts(delta, std::vector<float>(8), std::vector<float>(32)).ok());
  EXPECT_TRUE(AffineSpan::FromParts(delta, std::vector<float>(64), std::vector<float>(32)).ok());
  const AffineSpan other = AffineSpan::Identity({8, 8, DecayForm::kScalar, StateUpdate::kDelta}).value();
  EXPECT_FALSE(AffineSpan::Compose(AffineSpan::Identity(delta).value(), other).ok());
}

// Decays multiply until nothing is left; on the way there are floats that some processors are slow with.
TEST(LinearState, WhatIsTooSmallForANormalFloatIsNothing) {
  for (const DecayForm form : {DecayForm::kScalar, DecayForm::kVector}) {
    TokenStream stream({"", form, StateUpdate::kAdd, 1.4f, 1.4f, false, 0}, 32, 32, 128, 5);  // 64 tokens: e^-90
    std::fill(stream.v.begin() + 64 * 32, stream.v.end(), 0.0f);
    for (const Isa isa : TestableIsas()) {
      for (const std::vector<int>& chunks : {std::vector<int>{128}, std::vector<int>(128, 1)}) {
        StateMemory memory(stream.shape);
        const unsigned before = _mm_getcsr();
        RunTokens(isa, stream, memory, chunks);
        EXPECT_EQ(_mm_getcsr(), before) << "it is the caller's own affair how its floats are rounded";
        const std::vector<float> first = memory.StateAfterBlock(0);
        EXPECT_TRUE(std::all_of(first.begin(), first.end(), [](float x) { return std::isnormal(x); }));
        EXPECT_EQ(memory.StateAfterBlock(1), std::vector<float>(32 * 32, 0.0f));
      }
    }
  }
}

TEST(LinearState, ADecayOfNothingForgetsEverything) {
  TokenStream stream(kFamilies[1], 16, 16, 100, 2);
  for (int t = 0; t < 100; t += 10) stream.log_decay[t] = -1000;
  std::vector<double> state(16 * 16, 0.0);
  const std::vector<double> expected = reference::LinearState(stream.shape, stream.Tokens(), state);
  StateMemory memory(stream.shape);
  EXPECT_LT(RelativeError(RunTokens(TestableIsas().back(), stream, memory, {100}), expected), 2e-6);
}

TEST(LinearState, InputsThatDoNotFitAreNamed) {
  const TokenStream stream(kFamilies[0], 16, 16, 100, 2);
  StateMemory memory(stream.shape);
  ThreadPool pool({.threads = 1});
  const OpContext context{&pool, &SelectOps(Isa::kAvx2)};
  std::vector<float> o(100 * 16);
  const auto message = [&](LinearStateItem item, LinearStateShape shape) {
    return std::string(LinearState(context, shape, {&item, 1}, {}).message());
  };
  const LinearStateItem good = memory.Attach(stream.Item(0, 10), 0, o.data(), 16);
  EXPECT_EQ(message(good, stream.shape), "");
  LinearStateItem item = good;
  item.q = nullptr;
  EXPECT_EQ(message(item, stream.shape), "linear_state: item 0: q, k, v, o or pieces is null");
  item = good;
  item.first_position = 640;
  EXPECT_EQ(message(item, stream.shape), "linear_state: item 0: the state before block 10 is missing");
  item = good;
  item.piece_bytes = 64;
  EXPECT_NE(message(item, stream.shape).find("pieces of 64 bytes a block"), std::string::npos);
  LinearStateShape shape = stream.shape;
  shape.key_dim = 300;
  EXPECT_EQ(message(good, shape), "linear_state: a state of 300 x 16; each may be 1..256");
  memory.Drop({0});
  item = memory.Attach(stream.Item(0, 100), 0, o.data(), 16);
  EXPECT_NE(message(item, stream.shape).find("bytes of scratch"), std::string::npos);
}

}  // namespace
}  // namespace dovetail::kernels::testing
