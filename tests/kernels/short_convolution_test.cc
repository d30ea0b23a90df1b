#include "kernels/short_convolution.h"

#include <cmath>
#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/oracle.h"

namespace dovetail::kernels::testing {
namespace {

std::vector<float> Normals(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

constexpr int kChannels = 37, kWidth = 4, kRows = 50;

std::vector<float> Convolve(Isa isa, const std::vector<float>& x, const std::vector<int>& chunks, bool silu) {
  ThreadPool pool({.threads = 2});
  const OpContext context{&pool, &SelectOps(isa)};
  const std::vector<float> weights = Normals(kWidth * kChannels, 2), bias = Normals(kChannels, 3);
  std::vector<float> out(x.size()), history((kWidth - 1) * kChannels, 0.0f);
  int row = 0;
  for (const int rows : chunks) {
    const ShortConvolutionArgs args{.x = x.data() + row * kChannels,
                                    .history = history.data(),
                                    .weights = weights.data(),
                                    .bias = bias.data(),
                                    .silu = silu,
                                    .width = kWidth,
                                    .rows = rows,
                                    .channels = kChannels,
                                    .out = out.data() + row * kChannels};
    EXPECT_TRUE(ShortConvolution(context, args).ok());
    row += rows;
    for (int h = 0; h < kWidth - 1; ++h) {
      const int from = row - (kWidth - 1) + h;
      for (int c = 0; c < kChannels; ++c) history[h * kChannels + c] = from >= 0 ? x[from * kChannels + c] : 0.0f;
    }
  }
  return out;
}

TEST(ShortConvolution, IsTheSumOverTheLastTokens) {
  const std::vector<float> x = Normals(kRows * kChannels, 1);
  const std::vector<float> weights = Normals(kWidth * kChannels, 2), bias = Normals(kChannels, 3);
  for (const Isa isa : TestableIsas()) {
    for (const bool silu : {false, true}) {
      const std::vector<float> out = Convolve(isa, x, {kRows}, silu);
      for (int t = 0; t < kRows; ++t)
        for (int c = 0; c < kChannels; ++c) {
          double sum = bias[c];
          for (int w = 0; w < kWidth; ++w)
            if (t - 3 + w >= 0) sum += weights[w * kChannels + c] * x[(t - 3 + w) * kChannels + c];
          if (silu) sum /= 1 + std::exp(-sum);
          ASSERT_NEAR(out[t * kChannels + c], sum, 2e-6);
        }
    }
  }
}

TEST(ShortConvolution, BitsDependOnNeitherChunkingNorIsa) {
  const std::vector<float> x = Normals(kRows * kChannels, 1);
  const std::vector<float> whole = Convolve(Isa::kAvx2, x, {kRows}, true);
  for (const Isa isa : TestableIsas())
    for (const std::vector<int>& chunks : {std::vector<int>{1, 1, 1, 1, 46}, {2, 16, 31, 1}, {49, 1}})
      EXPECT_EQ(Convolve(isa, x, chunks, true), whole);
}

TEST(ShortConvolution, WidthsOutsideTheLimitsAreRefused) {
  ThreadPool pool({.threads = 1});
  const OpContext context{&pool, &SelectOps(Isa::kAvx2)};
  EXPECT_EQ(ShortConvolution(context, {.width = 9, .rows = 1, .channels = 8}).message(),
            "short convolution: 1 rows of 8 channels with 9 taps");
  EXPECT_FALSE(ShortConvolution(context, {.width = 4, .rows = 1, .channels = 8}).ok());
}

TEST(L2Norm, GivesUnitVectors) {
  ThreadPool pool({.threads = 1});
  const std::vector<float> x = Normals(3 * 2 * 21, 4);
  for (const Isa isa : TestableIsas()) {
    std::vector<float> out(x.size());
    const L2NormArgs args{.x = x.data(), .out = out.data(), .rows = 3, .vectors = 2, .size = 21, .factor = 0.5f};
    ASSERT_TRUE(L2Norm({&pool, &SelectOps(isa)}, args).ok());
    for (int v = 0; v < 6; ++v) {
      double sum = 1e-6;
      for (int i = 0; i < 21; ++i) sum += x[v * 21 + i] * x[v * 21 + i];
      for (int i = 0; i < 21; ++i) EXPECT_NEAR(out[v * 21 + i], 0.5 * x[v * 21 + i] / std::sqrt(sum), 1e-7);
    }
  }
}

}  // namespace
}  // namespace dovetail::kernels::testing
