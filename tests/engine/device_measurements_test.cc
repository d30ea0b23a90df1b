#include <gtest/gtest.h>

#include <cmath>

#include "engine/measurements/device/device_kernels.h"
#include "engine/measurements/device/step_overhead.h"
#include "kernels/packed_weights.h"
#include "kernels/thread_pool.h"

namespace dovetail::engine {
namespace {

constexpr double kShort = 1e-6;  // three runs of each point

// A step of L layers and B sequences takes 100 + 10 B + L (20 + 2 B + B V) us, V the values of a layer, and 5 us more
// for each token and 1000 entries of the vocabulary. A linear layer takes 7 us more.
TEST(StepOverhead, IsSolvedForFromSevenModels) {
  const auto step = [](double layers, double sequences, double values) {
    return 100 + 10 * sequences + layers * (20 + 2 * sequences + sequences * values);
  };
  OverheadSamples s;
  s.few_layers = 4, s.many_layers = 20, s.few_wide_layers = 2, s.many_wide_layers = 8, s.sequences = 10;
  s.narrow_values = 3, s.wide_values = 100, s.more_vocabulary = 2000;
  s.few = {step(4, 1, 3), step(4, 10, 3)};
  s.many = {step(20, 1, 3), step(20, 10, 3)};
  s.few_wide.batch = step(2, 10, 100);
  s.many_wide.batch = step(8, 10, 100);
  s.large_vocabulary.batch = s.few.batch + 10 * 2 * 5;
  s.few_linear = s.few.alone + 4 * 7;
  s.many_linear = s.many.alone + 20 * 7;
  const plan::StepOverhead out = FitOverhead(s);
  EXPECT_NEAR(out.layer_s, 20, 1e-9);
  EXPECT_NEAR(out.layer_sequence_s, 2, 1e-9);
  EXPECT_NEAR(out.value_s, 1, 1e-9);
  EXPECT_NEAR(out.sequence_s, 10, 1e-9);
  EXPECT_NEAR(out.step_s, 100, 1e-9);
  EXPECT_NEAR(out.choice_s, 5e-3, 1e-9);
  EXPECT_NEAR(out.linear_layer_s, 7, 1e-9);
  s.many.alone = 1;  // disturbed: many layers took less time than few
  EXPECT_EQ(FitOverhead(s).layer_s, 0);
}

TEST(DeviceMeasurements, StatesHaveARateForEachKind) {
  const auto device = kernels::CreateCpuDevice({.threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  const auto stream = (*device)->CreateStream();
  const auto states = MeasureStates(*stream, kShort);
  ASSERT_TRUE(states.ok()) << states.status();
  EXPECT_EQ(states->size(), 3u * 2 * 2);
  for (const plan::StateRates& rates : *states) {
    EXPECT_TRUE(rates.decode_s_per_value > 0 && std::isfinite(rates.decode_s_per_value)) << rates.dim;
    EXPECT_TRUE(rates.prompt_s_per_value > 0 && std::isfinite(rates.prompt_s_per_value)) << rates.dim;
  }
}

TEST(DeviceMeasurements, ReadsAreMeasuredByThreadsUpToAllOfThem) {
  const auto reads = MeasureReads(3);
  ASSERT_TRUE(reads.ok()) << reads.status();
  ASSERT_EQ(reads->size(), 3u);
  EXPECT_EQ((*reads)[0].threads, 1);
  EXPECT_EQ((*reads)[1].threads, 2);
  EXPECT_EQ((*reads)[2].threads, 3);
  for (const plan::ReadRate& rate : *reads) EXPECT_GT(rate.bytes_per_s, 0);
}

TEST(DeviceMeasurements, EveryFormatOfWeightsHasPointsFromOneRowOn) {
  const auto device = kernels::CreateCpuDevice({.threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  const auto stream = (*device)->CreateStream();
  const auto products = MeasureProducts(*stream, kShort, /*cache_bytes=*/2 << 20);
  ASSERT_TRUE(products.ok()) << products.status();
  EXPECT_EQ(products->size(), static_cast<size_t>(kernels::kPackedFormats));
  for (const plan::ProductRates& rates : *products) {
    EXPECT_GE(rates.bytes_per_weight, 0.5) << rates.weights;
    EXPECT_LE(rates.bytes_per_weight, 4) << rates.weights;
    ASSERT_EQ(rates.points.size(), 10u) << rates.weights;
    EXPECT_EQ(rates.points.front().rows, 1);
    for (const auto& point : rates.points) EXPECT_GT(point.s_per_weight, 0) << rates.weights << " " << point.rows;
    // A matrix of 2^20 weights fits into half of the caches.
    EXPECT_EQ(rates.cached_points.size(), rates.bytes_per_weight <= 1 ? 4u : 0u) << rates.weights;
    for (const auto& point : rates.cached_points) EXPECT_GT(point.s_per_weight, 0) << rates.weights;
  }
}

TEST(DeviceMeasurements, CachesAreWhatIsReadMuchFasterThanMemory) {
  kernels::ThreadPool pool({.threads = 1});
  const auto none = MeasureCacheBytes(pool, /*memory_rate=*/1e15);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(*none, 0);
  const auto all = MeasureCacheBytes(pool, /*memory_rate=*/1);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(*all, double{128 << 20});
}

}  // namespace
}  // namespace dovetail::engine
