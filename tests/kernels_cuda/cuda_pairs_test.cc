// Experts of few rows on a GPU, pair by pair, and the normed row that a router leaves.

#include <random>

#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/rows/row_ops.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/layer_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;
using testing::kHalves;
using testing::Rounding;
using testing::Sigmoid;

class CudaPairsTest : public testing::CudaLayerTest {};

std::vector<int32_t> RandomExperts(int pairs, int experts) {
  std::mt19937 random(7);
  std::vector<int32_t> expert(pairs);
  for (int32_t& of : expert) of = static_cast<int32_t>(random() % experts);
  return expert;
}

// x[row of x] . w[row of w], of k elements.
double Dot(const std::vector<float>& x, int64_t x_row, const std::vector<float>& w, int64_t w_row, int k) {
  double sum = 0;
  for (int j = 0; j < k; ++j) sum += static_cast<double>(x[x_row * k + j]) * w[w_row * k + j];
  return sum;
}

double Activated(ExpertActivation kind, double gate) {
  if (kind == ExpertActivation::kSilu) return gate * Sigmoid(gate);
  return gate * Sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate));
}

struct GateCase {
  int rows, chosen, experts, size, k;
  bool biased;
};
struct SumCase {
  int rows, chosen, experts, n, k;
  bool biased;
};

TEST_F(CudaPairsTest, GatedExpertsAreActivatedPairByPair) {
  for (const GateCase& c : {GateCase{1, 8, 128, 24, 2048, false},
                            {1, 1, 1, 9, 8, true},
                            {3, 2, 5, 17, 264, true},
                            {8, 4, 64, 8, 4104, false},
                            {2, 6, 60, 33, 1000, true}}) {
    for (const WireType type : kHalves) {
      for (const ExpertActivation activation : {ExpertActivation::kSilu, ExpertActivation::kGeluTanh}) {
        const int pairs = c.rows * c.chosen;
        std::vector<float> x = RandomFloats(c.rows * c.k, 1),
                           w = RandomFloats(c.experts * 2 * c.size * c.k, 2, -0.2f, 0.2f);
        const std::vector<float> bias = RandomFloats(c.experts * 2 * c.size, 3);
        const std::vector<int32_t> expert = RandomExperts(pairs, c.experts);
        const auto dx = UploadWire(type, x), dw = UploadWire(type, w), db = Upload(bias), de = Upload(expert);
        const auto y = Empty(pairs * c.size * 2 + 2);
        ASSERT_TRUE(GatePairs(stream(), {.x = dx->data(),
                                         .expert = As<int32_t>(de),
                                         .w = dw->data(),
                                         .bias = c.biased ? As<float>(db) : nullptr,
                                         .y = y->data(),
                                         .type = type,
                                         .activation = activation,
                                         .pairs = pairs,
                                         .chosen = c.chosen,
                                         .size = c.size,
                                         .k = c.k})
                        .ok());
        std::vector<double> want(pairs * c.size);
        for (int pair = 0; pair < pairs; ++pair) {
          for (int i = 0; i < c.size; ++i) {
            const int64_t gate_row = expert[pair] * int64_t{2} * c.size + i, other_row = gate_row + c.size;
            double gate = Dot(x, pair / c.chosen, w, gate_row, c.k), other = Dot(x, pair / c.chosen, w, other_row, c.k);
            if (c.biased) gate += bias[gate_row], other += bias[other_row];
            want[pair * c.size + i] = Activated(activation, gate) * other;
          }
        }
        ExpectNear(DownloadWire(type, *y), want, 1.1 * Rounding(type), 2e-4);
      }
    }
  }
}

TEST_F(CudaPairsTest, SecondProductsAreSummedOverTheExpertsOfARow) {
  for (const SumCase& c : {SumCase{1, 8, 128, 24, 768, false},
                           {1, 1, 1, 9, 8, true},
                           {3, 2, 5, 17, 264, true},
                           {5, 13, 40, 8, 1032, false},
                           {2, 6, 60, 33, 4000, true}}) {
    for (const WireType type : kHalves) {
      const int pairs = c.rows * c.chosen;
      std::vector<float> x = RandomFloats(pairs * c.k, 1), w = RandomFloats(c.experts * c.n * c.k, 2, -0.2f, 0.2f);
      const std::vector<float> bias = RandomFloats(c.experts * c.n, 3), weight = RandomFloats(pairs, 4);
      const std::vector<float> before = RandomFloats(c.rows * c.n, 5);
      const std::vector<int32_t> expert = RandomExperts(pairs, c.experts);
      const auto dx = UploadWire(type, x), dw = UploadWire(type, w), db = Upload(bias), de = Upload(expert);
      const auto dweight = Upload(weight), out = Upload(before);
      ASSERT_TRUE(SumPairs(stream(), {.x = dx->data(),
                                      .expert = As<int32_t>(de),
                                      .weight = As<float>(dweight),
                                      .w = dw->data(),
                                      .bias = c.biased ? As<float>(db) : nullptr,
                                      .out = As<float>(out),
                                      .type = type,
                                      .scale = 0.5f,
                                      .rows = c.rows,
                                      .chosen = c.chosen,
                                      .n = c.n,
                                      .k = c.k})
                      .ok());
      std::vector<double> want(before.begin(), before.end());
      for (int pair = 0; pair < pairs; ++pair) {
        for (int i = 0; i < c.n; ++i) {
          const int64_t w_row = expert[pair] * int64_t{c.n} + i;
          const double product = Dot(x, pair, w, w_row, c.k) + (c.biased ? bias[w_row] : 0.0f);
          want[pair / c.chosen * c.n + i] += 0.5 * weight[pair] * product;
        }
      }
      ExpectNear(Download<float>(*out), want, 1e-5, 2e-5 * c.chosen);
    }
  }
}

TEST_F(CudaPairsTest, ARouterLeavesTheRowThatItHasNormed) {
  struct Case {
    int rows, hidden, experts;
  };
  for (const Case& c : {Case{1, 2048, 128}, {5, 200, 60}, {37, 1030, 32}, {520, 72, 16}}) {
    for (const WireType type : kHalves) {
      const int chosen = 2;
      const std::vector<float> x = RandomFloats(c.rows * c.hidden, 1, -3, 3), norm = RandomFloats(c.hidden, 2, 0.5f, 2);
      const std::vector<float> w = RandomFloats(c.experts * c.hidden, 3, -0.2f, 0.2f);
      const auto dx = Upload(x), dn = Upload(norm), dw = Upload(w);
      const auto expert = Empty(c.rows * chosen * 4), weight = Empty(c.rows * chosen * 4);
      const auto h = Empty(c.rows * c.hidden * 2 + 2);
      ASSERT_TRUE(RouteExperts(stream(), {.x = As<float>(dx),
                                          .norm = As<float>(dn),
                                          .router = As<float>(dw),
                                          .expert = As<int32_t>(expert),
                                          .weight = As<float>(weight),
                                          .h = h->data(),
                                          .type = type,
                                          .eps = 1e-6f,
                                          .rows = c.rows,
                                          .hidden = c.hidden,
                                          .experts = c.experts,
                                          .chosen = chosen})
                      .ok());
      std::vector<double> want(c.rows * c.hidden);
      for (int row = 0; row < c.rows; ++row) {
        double squares = 0;
        for (int i = 0; i < c.hidden; ++i) squares += double{x[row * c.hidden + i]} * x[row * c.hidden + i];
        for (int i = 0; i < c.hidden; ++i)
          want[row * c.hidden + i] = x[row * c.hidden + i] / std::sqrt(squares / c.hidden + 1e-6) * norm[i];
      }
      ExpectNear(DownloadWire(type, *h), want, 1.1 * Rounding(type), 1e-6);
    }
  }
}

TEST_F(CudaPairsTest, OddSizesAndTypesAreRefused) {
  const auto memory = Empty(4096);
  const PairGateLaunch gate{.x = memory->data(),
                            .expert = As<int32_t>(memory),
                            .w = memory->data(),
                            .y = memory->data(),
                            .pairs = 1,
                            .chosen = 1,
                            .size = 4,
                            .k = 8};
  const auto gate_refused = [&](auto&& change) {
    PairGateLaunch args = gate;
    change(args);
    return GatePairs(stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(gate_refused([](auto& args) { args.k = 12; }));
  EXPECT_TRUE(gate_refused([](auto& args) { args.type = WireType::kF32; }));
  EXPECT_TRUE(gate_refused([](auto& args) { args.activation = ExpertActivation::kNone; }));
  EXPECT_TRUE(gate_refused([](auto& args) { args.w = nullptr; }));
  EXPECT_TRUE(gate_refused([](auto& args) { args.chosen = 0; }));
  const PairSumLaunch sum{.x = memory->data(),
                          .expert = As<int32_t>(memory),
                          .weight = As<float>(memory),
                          .w = memory->data(),
                          .out = As<float>(memory),
                          .rows = 1,
                          .chosen = 1,
                          .n = 4,
                          .k = 8};
  const auto sum_refused = [&](auto&& change) {
    PairSumLaunch args = sum;
    change(args);
    return SumPairs(stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(sum_refused([](auto& args) { args.k = 4; }));
  EXPECT_TRUE(sum_refused([](auto& args) { args.type = WireType::kF32; }));
  EXPECT_TRUE(sum_refused([](auto& args) { args.weight = nullptr; }));
}

TEST(MultipliesPairs, OneRowAndRowsThatHardlyShareExperts) {
  EXPECT_TRUE(MultipliesPairs(1, 8, 8));
  EXPECT_TRUE(MultipliesPairs(8, 8, 128));
  EXPECT_FALSE(MultipliesPairs(9, 8, 128));
  EXPECT_FALSE(MultipliesPairs(3, 2, 8));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
