#include "engine/measurements/device/gpu_rates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>

#include "tests/kernels_cuda/cuda_fixture.h"

// Small shapes: that every point is measured, not how fast it is.

namespace dovetail::engine {
namespace {

constexpr double kShort = 1e-6;  // three runs of each point
constexpr GpuSizes kSmall{.outputs = 64,
                          .inputs = 128,
                          .rows = 16,
                          .matrices = 2,
                          .sequences = 2,
                          .context = 100,
                          .prompt = 64,
                          .read_bytes = size_t{1} << 20};

bool IsRate(double value) { return value > 0 && std::isfinite(value); }

using GpuRatesTest = kernels::cuda::testing::CudaTest;

TEST_F(GpuRatesTest, MemoryIsRead) {
  const auto reads = MeasureGpuReads(device(), kShort, kSmall);
  ASSERT_TRUE(reads.ok()) << reads.status();
  ASSERT_EQ(reads->size(), 1u);
  EXPECT_TRUE(IsRate((*reads)[0].bytes_per_s));
}

TEST_F(GpuRatesTest, ProductsHavePointsFromOneRowOn) {
  const auto products = MeasureGpuProducts(device(), kShort, kSmall);
  ASSERT_TRUE(products.ok()) << products.status();
  ASSERT_EQ(products->size(), 1u);
  const plan::ProductRates& rates = (*products)[0];
  EXPECT_EQ(rates.weights, "bf16");
  EXPECT_EQ(rates.bytes_per_weight, 2);
  ASSERT_EQ(rates.points.size(), 5u);
  for (size_t i = 0; i < rates.points.size(); ++i) {
    EXPECT_EQ(rates.points[i].rows, 1 << i);
    EXPECT_TRUE(IsRate(rates.points[i].s_per_weight)) << rates.points[i].rows;
  }
}

TEST_F(GpuRatesTest, AProductOfAnyShapeCanBeTimed) {
  const auto seconds = MeasureGpuProduct(device(), 3, 48, 64, kShort);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_TRUE(IsRate(*seconds));
}

TEST_F(GpuRatesTest, AttentionHasARateForEachShape) {
  const auto attention = MeasureGpuAttention(device(), kShort, kSmall);
  ASSERT_TRUE(attention.ok()) << attention.status();
  std::set<std::tuple<int, int, int>> shapes;
  for (const plan::AttentionRates& rates : *attention) {
    shapes.insert({static_cast<int>(rates.storage), rates.head_dim, rates.group});
    EXPECT_TRUE(IsRate(rates.decode_bytes_per_s)) << rates.head_dim << " " << rates.group;
    EXPECT_TRUE(IsRate(rates.prompt_flops_per_s)) << rates.head_dim << " " << rates.group;
  }
  EXPECT_EQ(shapes.size(), 2u * 3 * 3);
  EXPECT_EQ(shapes.size(), attention->size());
}

TEST_F(GpuRatesTest, StatesHaveARateForEachKind) {
  const auto states = MeasureGpuStates(device(), kShort, kSmall);
  ASSERT_TRUE(states.ok()) << states.status();
  EXPECT_EQ(states->size(), 2u * 2 * 2);
  for (const plan::StateRates& rates : *states) {
    EXPECT_TRUE(IsRate(rates.decode_s_per_value)) << rates.dim << " " << rates.delta << " " << rates.vector_decay;
    EXPECT_TRUE(IsRate(rates.prompt_s_per_value)) << rates.dim << " " << rates.delta << " " << rates.vector_decay;
  }
}

}  // namespace
}  // namespace dovetail::engine
