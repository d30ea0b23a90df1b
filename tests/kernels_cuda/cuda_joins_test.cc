#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/exchange/cuda_exchange.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using CudaJoinsTest = testing::CudaTest;

// Joins of one and of many partials, some of which have not the first rows; one of all of them sees nothing.
TEST_F(CudaJoinsTest, AreTheSumsOverAllTokensAndSinks) {
  const auto stream = *device().CreateCudaStream();
  constexpr int kHeads = 3, kDim = 72, kModelHeads = 5, kRows = 4, kCount = 13;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  struct Made {
    int first_row, rows;
    size_t o, ml;
  };
  std::vector<Made> made;
  std::vector<float> floats, sinks(kModelHeads);
  for (float& sink : sinks) sink = normal(random);
  for (int i = 0; i < kCount + 1; ++i) {
    const int first = i % 3 == 2 ? 2 : 0, rows = kRows - first;
    made.push_back({first, rows, floats.size(), floats.size() + size_t{kDim} * kHeads * rows});
    for (int j = 0; j < rows * kHeads * kDim; ++j) floats.push_back(normal(random));
    for (int j = 0; j < rows * kHeads; ++j) {
      const bool nothing = i == 4 || (i < kCount && j < kHeads && first == 0 && i % 2 == 0);
      floats.push_back(nothing ? -INFINITY : 3 * normal(random));
      floats.push_back(nothing ? 0 : 1 + std::abs(normal(random)));
    }
  }
  auto values = *device().Allocate(floats.size() * sizeof(float)), sinks_there = *device().Allocate(64);
  auto out = *device().Allocate((kRows + 1) * kModelHeads * kDim * sizeof(float));
  const auto* const there = reinterpret_cast<const float*>(values->data());
  std::vector<ExchangePartial> partials;
  for (const Made& m : made) partials.push_back({there + m.o, there + m.ml, m.first_row, m.rows});
  auto* const o = reinterpret_cast<float*>(out->data());
  // The second join has the last partial alone, and one row of it.
  const ExchangeJoin joins[] = {{o + kDim, kRows, kHeads, 1, 0, kCount},
                                {o + (kRows * kModelHeads + 2) * kDim, 1, kHeads, 2, kCount, 1}};
  auto lists = *device().Allocate(sizeof(joins) + partials.size() * sizeof(ExchangePartial));
  const auto put = [&](void* to, const void* from, size_t bytes) {
    ASSERT_TRUE(stream->Copy(to, from, bytes).ok());
    ASSERT_TRUE(stream->SynchronizeStatus().ok());
  };
  put(lists->data(), joins, sizeof(joins));
  put(lists->data() + sizeof(joins), partials.data(), partials.size() * sizeof(ExchangePartial));
  put(values->data(), floats.data(), floats.size() * sizeof(float));
  put(sinks_there->data(), sinks.data(), sinks.size() * sizeof(float));
  ExchangeJoinsLaunch launch;
  launch.joins = reinterpret_cast<const ExchangeJoin*>(lists->data());
  launch.partials = reinterpret_cast<const ExchangePartial*>(lists->data() + sizeof(joins));
  launch.sinks = reinterpret_cast<const float*>(sinks_there->data());
  launch.o_row_step = kModelHeads * kDim;
  launch.o_type = WireType::kF32;
  launch.count = 2;
  launch.units = kRows * kHeads;
  launch.value_dim = kDim;
  ASSERT_TRUE(stream->Fill(out->data(), 0, out->size_bytes()).ok());
  ASSERT_TRUE(ExchangeJoins(*stream, launch).ok());
  std::vector<float> came(out->size_bytes() / sizeof(float));
  ASSERT_TRUE(stream->Copy(came.data(), out->data(), out->size_bytes()).ok());
  ASSERT_TRUE(stream->SynchronizeStatus().ok());
  for (const ExchangeJoin& join : joins)
    for (int row = 0; row < join.rows; ++row)
      for (int head = 0; head < kHeads; ++head)
        for (int dim = 0; dim < kDim; ++dim) {
          double sum = 0, l = std::exp(sinks[join.first_head + head]);
          for (int i = join.first; i < join.first + join.count; ++i) {
            const Made& m = made[i];
            if (row < m.first_row) continue;
            const size_t at = size_t{kHeads} * (row - m.first_row) + head;
            const double weight = std::exp(static_cast<double>(floats[m.ml + 2 * at]));
            l += weight * floats[m.ml + 2 * at + 1];
            sum += weight * floats[m.o + at * kDim + dim];
          }
          const float* const first = static_cast<const float*>(join.o) - o + came.data();
          EXPECT_NEAR(first[(row * kModelHeads + head) * kDim + dim], sum / l, 2e-5) << row << " " << head;
        }
  EXPECT_EQ(came[0], 0) << "another sequence's head";
  launch.units = kMostJoinUnits + 1;
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangeJoins(*stream, launch)));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
