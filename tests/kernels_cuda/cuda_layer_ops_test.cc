#include <cmath>
#include <numeric>

#include "gtest/gtest.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/state/layer_ops.h"
#include "kernels/moe.h"
#include "kernels/state_gates.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/layer_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;
using testing::CudaLayerTest;
using testing::kHalves;
using testing::Rounding;
using testing::Sigmoid;

class CudaHybridOpsTest : public CudaLayerTest {};

TEST_F(CudaHybridOpsTest, InputsOfAStateAreSplitAndActivated) {
  for (const WireType type : kHalves) {
    for (const bool silu : {false, true}) {
      const int rows = 3, q = 24, k = 40, v = 70, width = q + k + v;
      std::vector<float> x = RandomFloats(rows * width, 1, -3, 3), factor = RandomFloats(rows * v, 2);
      const auto dx = UploadWire(type, x), df = UploadWire(type, factor);
      const auto dq = Empty(rows * q * 2 + 8), dk = Empty(rows * k * 2 + 8), dv = Empty(rows * v * 2 + 8);
      StateInputsLaunch args{.qkv = dx->data(),
                             .v_factor = silu ? nullptr : df->data(),
                             .q = dq->data(),
                             .k = dk->data(),
                             .v = dv->data(),
                             .type = type,
                             .silu = silu,
                             .rows = rows,
                             .q_width = q,
                             .k_width = k,
                             .v_width = v};
      ASSERT_TRUE(StateInputs(stream(), args).ok());
      std::vector<double> want[3];
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < width; ++i) {
          double y = x[row * width + i];
          if (silu) y *= Sigmoid(y);
          if (!silu && i >= q + k) y *= factor[row * v + i - q - k];
          want[i < q ? 0 : i < q + k ? 1 : 2].push_back(y);
        }
      ExpectNear(DownloadWire(type, *dq), want[0], Rounding(type) + 1e-5, 1e-6);
      ExpectNear(DownloadWire(type, *dk), want[1], Rounding(type) + 1e-5, 1e-6);
      ExpectNear(DownloadWire(type, *dv), want[2], Rounding(type) + 1e-5, 1e-6);
    }
  }
}

TEST_F(CudaHybridOpsTest, GatesOfAStateAreThoseOfTheCpu) {
  for (const int width : {1, 24}) {
    for (const bool step_is_rate : {false, true}) {
      if (step_is_rate && width != 1) continue;
      const int rows = 5, heads = 6, stride = width + 1;
      const std::vector<float> x = RandomFloats(rows * heads * width, 1, -8, 8), rate = RandomFloats(rows * heads, 2);
      const std::vector<float> bias = RandomFloats(heads * width, 3);
      const std::vector<float> factor = RandomFloats(heads * width, 4, -16, -0.1f);
      std::vector<float> want(rows * heads * stride);
      StepDecayArgs decay{.x = x.data(),
                          .bias = bias.data(),
                          .factor = factor.data(),
                          .low = 1e-3f,
                          .high = 5,
                          .rate = step_is_rate,
                          .rows = rows,
                          .heads = heads,
                          .width = width,
                          .stride = stride,
                          .out = want.data()};
      ASSERT_TRUE(StepDecay(cpu(), decay).ok());
      if (!step_is_rate) {
        ASSERT_TRUE(SigmoidRate(cpu(), {rate.data(), 2.0f, rows, heads, stride, width, want.data()}).ok());
      }
      const auto dx = Upload(x), db = Upload(bias), df = Upload(factor), dr = Upload(rate);
      const auto out = Empty((want.size() + 1) * 4);
      StateGatesLaunch args{.x = As<float>(dx),
                            .bias = As<float>(db),
                            .factor = As<float>(df),
                            .rate = step_is_rate ? nullptr : As<float>(dr),
                            .out = As<float>(out),
                            .scale = 1,
                            .low = 1e-3f,
                            .high = 5,
                            .rate_scale = 2,
                            .step_is_rate = step_is_rate,
                            .rows = rows,
                            .heads = heads,
                            .width = width,
                            .stride = stride};
      ASSERT_TRUE(StateGates(stream(), args).ok());
      ExpectNear(Download<float>(*out), {want.begin(), want.end()}, 1e-5, 1e-6);
    }
  }
}

TEST_F(CudaHybridOpsTest, ResultsAreGatedAndNormedInEitherOrder) {
  for (const WireType type : kHalves) {
    for (const GateKind kind : {GateKind::kNone, GateKind::kSigmoid, GateKind::kSilu, GateKind::kPlain}) {
      for (const int form : {0, 1, 2, 3}) {  // no norm; of each vector; in groups of the row; gated first
        const int rows = 3, width = 96, size = form == 2 ? 48 : 32;
        std::vector<float> x = RandomFloats(rows * width, 5, -2, 2), gate = RandomFloats(rows * width, 6, -4, 4);
        const std::vector<float> weight = RandomFloats(width, 7, 0.5f, 1.5f);
        const auto dx = UploadWire(type, x), dg = UploadWire(type, gate), dw = Upload(weight);
        const auto out = Empty(rows * width * 2 + 8);
        OutputGateLaunch args{.x = dx->data(),
                              .gate = kind == GateKind::kNone ? nullptr : dg->data(),
                              .weight = form == 0 ? nullptr : As<float>(dw),
                              .out = out->data(),
                              .type = type,
                              .kind = kind,
                              .scale = 0.5f,
                              .eps = 1e-5f,
                              .gate_first = form == 3,
                              .weight_each = form == 2,
                              .rows = rows,
                              .width = width,
                              .size = size};
        ASSERT_TRUE(OutputGate(stream(), args).ok());
        std::vector<double> want(rows * width);
        for (int vector = 0; vector < rows * width / size; ++vector) {
          double squares = 0;
          const auto factor = [&](int i) {
            const double g = 0.5 * gate[i];
            return kind == GateKind::kNone      ? 1.0
                   : kind == GateKind::kSigmoid ? Sigmoid(g)
                   : kind == GateKind::kSilu    ? g * Sigmoid(g)
                                                : g;
          };
          for (int i = vector * size; i < (vector + 1) * size; ++i)
            squares += std::pow(x[i] * (form == 3 ? factor(i) : 1.0), 2);
          const double inverse = form == 0 ? 1 : 1 / std::sqrt(squares / size + 1e-5);
          for (int i = vector * size; i < (vector + 1) * size; ++i)
            want[i] = x[i] * factor(i) * inverse * (form == 0 ? 1.0f : weight[form == 2 ? i % width : i % size]);
        }
        ExpectNear(DownloadWire(type, *out), want, Rounding(type) + 1e-5, 1e-5);
      }
    }
  }
}

TEST_F(CudaHybridOpsTest, KeysOfALatentAreJoinedWithTheSharedOnes) {
  const int rows = 3, heads = 5, own = 12, shared = 6, shared_step = 40, step = 200;
  std::vector<float> a = RandomFloats(rows * heads * own, 1), b = RandomFloats(rows * shared_step, 2);
  const auto da = UploadWire(WireType::kBF16, a), db = UploadWire(WireType::kBF16, b);
  const auto out = Empty(rows * step * 2);
  JoinKeysLaunch args{.own = da->data(),
                      .shared = db->data(),
                      .out = out->data(),
                      .type = WireType::kBF16,
                      .shared_step = shared_step,
                      .out_step = step,
                      .rows = rows,
                      .heads = heads,
                      .own_dim = own,
                      .shared_dim = shared};
  ASSERT_TRUE(JoinKeys(stream(), args).ok());
  const std::vector<float> got = DownloadWire(WireType::kBF16, *out);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < heads * (own + shared); ++i) {
      const int head = i / (own + shared), at = i % (own + shared);
      EXPECT_EQ(got[row * step + i], at < own ? a[(row * heads + head) * own + at] : b[row * shared_step + at - own]);
    }
    EXPECT_TRUE(std::isnan(got[row * step + heads * (own + shared)]));
  }
}

TEST_F(CudaHybridOpsTest, ActivationsOfMlpsAgreeWithTheirFormulas) {
  for (const MlpKind kind : {MlpKind::kSilu, MlpKind::kGeluTanh, MlpKind::kClampedSwiglu, MlpKind::kRelu2}) {
    const int rows = 4, size = 300;
    const bool gated = kind != MlpKind::kRelu2;
    const int width = gated ? 2 * size : size;
    std::vector<float> x = RandomFloats(rows * width, 3, -10, 10);
    const auto dx = UploadWire(WireType::kBF16, x);
    const auto out = Empty(rows * size * 2 + 8);
    MlpActivationLaunch args{
        .gate_up = dx->data(), .out = out->data(), .type = WireType::kBF16, .kind = kind, .rows = rows, .size = size};
    ASSERT_TRUE(MlpActivation(stream(), args).ok());
    std::vector<double> want;
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < size; ++i) {
        const double g = x[row * width + i], u = x[row * width + (gated ? size : 0) + i];
        const double clamped = std::min(g, 7.0);
        want.push_back(kind == MlpKind::kSilu ? g * Sigmoid(g) * u
                       : kind == MlpKind::kGeluTanh
                           ? g / 2 * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u
                       : kind == MlpKind::kRelu2 ? std::pow(std::max(u, 0.0), 2)
                                                 : clamped * Sigmoid(1.702 * clamped) * (std::clamp(u, -7.0, 7.0) + 1));
      }
    ExpectNear(DownloadWire(WireType::kBF16, *out), want, Rounding(WireType::kBF16) + 1e-4, 1e-4);
  }
}

TEST_F(CudaHybridOpsTest, RoutersChooseAsTheCpuDoes) {
  for (const int experts : {4, 60, 256}) {
    for (const RouteScore score : {RouteScore::kSoftmax, RouteScore::kSigmoid, RouteScore::kSoftmaxOfChosen}) {
      for (const bool biased : {false, true}) {
        const int groups = biased && experts != 60 ? 2 : experts == 60 ? 6 : 1, chosen_groups = (groups + 1) / 2;
        const int rows = 9, hidden = 200, chosen = std::min(experts / groups * chosen_groups, 8);
        const std::vector<float> x = RandomFloats(rows * hidden, 1), norm = RandomFloats(hidden, 2, 0.5f, 1.5f);
        const std::vector<float> w = RandomFloats(experts * hidden, 3, -0.2f, 0.2f), bias = RandomFloats(experts, 4);
        std::vector<float> logits(rows * experts), weight(rows * chosen);
        for (int row = 0; row < rows; ++row) {
          double squares = 0;
          for (int i = 0; i < hidden; ++i) squares += x[row * hidden + i] * static_cast<double>(x[row * hidden + i]);
          const double inverse = 1 / std::sqrt(squares / hidden + 1e-6);
          for (int e = 0; e < experts; ++e) {
            double sum = biased ? bias[e] : 0.0;
            for (int i = 0; i < hidden; ++i) sum += x[row * hidden + i] * inverse * norm[i] * w[e * hidden + i];
            logits[row * experts + e] = static_cast<float>(sum);
          }
        }
        std::vector<int32_t> expert(rows * chosen);
        const bool renormalise = experts != 60;
        ASSERT_TRUE(Route(cpu(), {.logits = logits.data(),
                                  .selection_bias = biased ? bias.data() : nullptr,
                                  .score = static_cast<RouterScore>(score),
                                  .renormalise = renormalise,
                                  .scale = 2.5f,
                                  .rows = rows,
                                  .experts = experts,
                                  .chosen = chosen,
                                  .groups = groups,
                                  .chosen_groups = chosen_groups,
                                  .expert = expert.data(),
                                  .weight = weight.data()})
                        .ok());
        const auto dx = Upload(x), dn = Upload(norm), dw = Upload(w), db = Upload(bias);
        const auto de = Empty(rows * chosen * 4), dweight = Empty(rows * chosen * 4);
        RouteLaunch args{.x = As<float>(dx),
                         .norm = As<float>(dn),
                         .router = As<float>(dw),
                         .bias = biased ? As<float>(db) : nullptr,
                         .selection_bias = biased ? As<float>(db) : nullptr,
                         .expert = As<int32_t>(de),
                         .weight = As<float>(dweight),
                         .eps = 1e-6f,
                         .scale = 2.5f,
                         .score = score,
                         .renormalise = renormalise,
                         .rows = rows,
                         .hidden = hidden,
                         .experts = experts,
                         .chosen = chosen,
                         .groups = groups,
                         .chosen_groups = chosen_groups};
        ASSERT_TRUE(RouteExperts(stream(), args).ok());
        EXPECT_EQ(Download<int32_t>(*de), expert) << experts << " " << static_cast<int>(score);
        ExpectNear(Download<float>(*dweight), {weight.begin(), weight.end()}, 1e-4, 1e-6);
      }
    }
  }
}

// Many rows read the router's weights together. That changes no bit of any.
TEST_F(CudaHybridOpsTest, RoutersChooseForManyRowsWhatTheyChooseForFew) {
  struct Case {
    int rows, hidden, experts, groups;
  };
  for (const Case& c : {Case{515, 200, 60, 6}, {512, 300, 128, 1}, {600, 3000, 40, 1}, {513, 7200, 6, 1}}) {
    const int chosen = 4, few = 103;
    const std::vector<float> x = RandomFloats(c.rows * c.hidden, 1), norm = RandomFloats(c.hidden, 2, 0.5f, 1.5f);
    const std::vector<float> w = RandomFloats(c.experts * c.hidden, 3, -0.2f, 0.2f), bias = RandomFloats(c.experts, 4);
    const auto dx = Upload(x), dn = Upload(norm), dw = Upload(w), db = Upload(bias);
    const auto route = [&](int first, int rows, std::vector<int32_t>& expert, std::vector<float>& weight) {
      const auto de = Empty(rows * chosen * 4), dweight = Empty(rows * chosen * 4);
      ASSERT_TRUE(RouteExperts(stream(), {.x = As<float>(dx) + first * c.hidden,
                                          .norm = As<float>(dn),
                                          .router = As<float>(dw),
                                          .bias = As<float>(db),
                                          .selection_bias = As<float>(db),
                                          .expert = As<int32_t>(de),
                                          .weight = As<float>(dweight),
                                          .eps = 1e-6f,
                                          .rows = rows,
                                          .hidden = c.hidden,
                                          .experts = c.experts,
                                          .chosen = chosen,
                                          .groups = c.groups,
                                          .chosen_groups = (c.groups + 1) / 2})
                      .ok());
      const auto experts = Download<int32_t>(*de);
      const auto weights = Download<float>(*dweight);
      expert.insert(expert.end(), experts.begin(), experts.end());
      weight.insert(weight.end(), weights.begin(), weights.end());
    };
    std::vector<int32_t> many_experts, few_experts;
    std::vector<float> many_weights, few_weights;
    route(0, c.rows, many_experts, many_weights);
    for (int first = 0; first < c.rows; first += few)
      route(first, std::min(few, c.rows - first), few_experts, few_weights);
    EXPECT_EQ(many_experts, few_experts) << c.hidden;
    EXPECT_EQ(many_weights, few_weights) << c.hidden;
  }
}

// Rows through their experts, one product: places, tiles, both sizes of them.
TEST_F(CudaHybridOpsTest, ExpertsMultiplyTheRowsThatChoseThem) {
  struct Case {
    int rows, experts, chosen, n, k, tile_rows;
  };
  for (const Case& c : {Case{1, 8, 2, 72, 64, 16},
                        {5, 60, 4, 40, 136, 16},
                        {33, 4, 4, 130, 200, 16},
                        {70, 3, 2, 130, 200, 32},
                        {200, 6, 2, 64, 96, 64},
                        {77, 3, 1, 200, 264, 64},
                        {300, 128, 8, 48, 32, 64},
                        {300, 1, 1, 264, 200, kGroupedTileRows},
                        {200, 3, 2, 72, 128, kGroupedTileRows},
                        {700, 5, 2, 560, 328, kGroupedTileRows}}) {
    if (c.tile_rows == kGroupedTileRows && !GroupsProducts(stream()).value()) continue;
    for (const WireType type : kHalves) {
      for (const bool by_row : {true, false}) {
        const int pairs = c.rows * c.chosen;
        std::vector<float> x = RandomFloats((by_row ? c.rows : pairs) * c.k, 1);
        std::vector<float> w = RandomFloats(c.experts * c.n * c.k, 2);
        const std::vector<float> bias = RandomFloats(c.experts * c.n, 3), weight = RandomFloats(pairs, 4);
        std::vector<int32_t> expert(pairs);
        std::mt19937 random(9);
        for (int row = 0; row < c.rows; ++row) {
          std::vector<int32_t> all(c.experts);
          std::iota(all.begin(), all.end(), 0);
          std::shuffle(all.begin(), all.end(), random);
          for (int s = 0; s < c.chosen; ++s) expert[row * c.chosen + s] = all[s];
        }
        const int most = MostExpertTiles(pairs, c.experts, c.tile_rows);
        const auto dx = UploadWire(type, x), dw = UploadWire(type, w), db = Upload(bias), de = Upload(expert);
        const auto dweight = Upload(weight);
        const auto slot = Empty(pairs * 4), member = Empty(pairs * 4), tiles = Empty(most * sizeof(ExpertTile));
        const auto y = Empty((pairs * c.n + 2) * 4);
        ASSERT_TRUE(PlaceExperts(stream(), {.expert = As<int32_t>(de),
                                            .slot = As<int32_t>(slot),
                                            .member = As<int32_t>(member),
                                            .tiles = As<ExpertTile>(tiles),
                                            .pairs = pairs,
                                            .chosen = c.chosen,
                                            .experts = c.experts,
                                            .tile_rows = c.tile_rows,
                                            .most_tiles = most})
                        .ok());
        ASSERT_TRUE(MultiplyExperts(stream(), {.x = dx->data(),
                                               .member = by_row ? As<int32_t>(member) : nullptr,
                                               .w = dw->data(),
                                               .bias = As<float>(db),
                                               .y = y->data(),
                                               .type = type,
                                               .y_is_f32 = 1,
                                               .tiles = As<ExpertTile>(tiles),
                                               .most_tiles = most,
                                               .tile_rows = c.tile_rows,
                                               .n = c.n,
                                               .k = c.k,
                                               .experts = c.experts})
                        .ok());
        const std::vector<int32_t> slots = Download<int32_t>(*slot), members = Download<int32_t>(*member);
        std::vector<double> want(pairs * c.n);
        for (int pair = 0; pair < pairs; ++pair) {
          ASSERT_GE(slots[pair], 0);
          ASSERT_LT(slots[pair], pairs);
          ASSERT_EQ(members[slots[pair]], pair / c.chosen);
          const int row = by_row ? pair / c.chosen : slots[pair];
          for (int i = 0; i < c.n; ++i) {
            double sum = bias[expert[pair] * c.n + i];
            for (int j = 0; j < c.k; ++j)
              sum += static_cast<double>(x[row * c.k + j]) * w[(expert[pair] * c.n + i) * c.k + j];
            want[slots[pair] * c.n + i] = sum;
          }
        }
        const std::vector<float> got = Download<float>(*y);
        ExpectNear(got, want, 1e-5, 1e-5 * c.k);
        std::vector<float> before = RandomFloats(c.rows * c.n, 5);
        const auto out = Upload(before);
        ASSERT_TRUE(SumExperts(stream(), {.y = As<float>(y),
                                          .slot = As<int32_t>(slot),
                                          .weight = As<float>(dweight),
                                          .out = As<float>(out),
                                          .scale = 0.5f,
                                          .rows = c.rows,
                                          .chosen = c.chosen,
                                          .size = c.n})
                        .ok());
        std::vector<double> sums(before.begin(), before.end());
        for (int pair = 0; pair < pairs; ++pair)
          for (int i = 0; i < c.n; ++i)
            sums[pair / c.chosen * c.n + i] += 0.5 * weight[pair] * got[slots[pair] * c.n + i];
        ExpectNear(Download<float>(*out), sums, 1e-5, 1e-5);
      }
    }
  }
}

// The first half of gated experts in one kernel: act(gate) * up of each pair, rounded once.
TEST_F(CudaHybridOpsTest, GatedExpertsAreActivatedWhereTheyAreMultiplied) {
  struct Case {
    int rows, experts, size, k, tile_rows;
  };
  for (const Case& c : {Case{300, 1, 136, 64, kGroupedTileRows},
                        {520, 4, 264, 200, kGroupedTileRows},
                        {130, 3, 8, 72, kGroupedTileRows},
                        {40, 3, 33, 200, kFewTileRows},
                        {5, 5, 7, 8, kFewTileRows},
                        {90, 2, 72, 264, kFewTileRows},
                        {90, 3, 33, 264, kMoreTileRows},
                        {150, 3, 33, 136, kManyTileRows},
                        {64, 1, 64, 64, kManyTileRows}}) {
    if (c.tile_rows == kGroupedTileRows && !GroupsProducts(stream()).value()) continue;
    for (const WireType type : kHalves) {
      for (const ExpertActivation activation : {ExpertActivation::kSilu, ExpertActivation::kGeluTanh}) {
        std::vector<float> x = RandomFloats(c.rows * c.k, 1),
                           w = RandomFloats(c.experts * 2 * c.size * c.k, 2, -0.3, 0.3);
        std::vector<ExpertTile> tiles;  // a third of the rows with each expert; one tile has none
        std::vector<int32_t> expert(c.rows), member(c.rows);
        for (int slot = 0; slot < c.rows; ++slot) member[slot] = c.rows - 1 - slot;
        for (int first = 0, e = 0; first < c.rows; ++e) {
          const int rows = std::min({c.rows - first, (c.rows + c.experts - 1) / c.experts, int{c.tile_rows}});
          tiles.push_back({std::min(e, c.experts - 1), first, rows});
          for (int i = 0; i < rows; ++i) expert[first + i] = tiles.back().expert;
          first += rows;
        }
        tiles.push_back({0, 0, 0});
        const auto dx = UploadWire(type, x), dw = UploadWire(type, w), dm = Upload(member), dt = Upload(tiles);
        const auto y = Empty(c.rows * c.size * 2 + 2);
        ASSERT_TRUE(MultiplyExperts(stream(), {.x = dx->data(),
                                               .member = As<int32_t>(dm),
                                               .w = dw->data(),
                                               .y = y->data(),
                                               .type = type,
                                               .tiles = As<ExpertTile>(dt),
                                               .most_tiles = static_cast<int32_t>(tiles.size()),
                                               .tile_rows = c.tile_rows,
                                               .n = 2 * c.size,
                                               .k = c.k,
                                               .experts = c.experts,
                                               .activation = activation})
                        .ok());
        std::vector<double> want(c.rows * c.size);
        for (int slot = 0; slot < c.rows; ++slot) {
          for (int i = 0; i < c.size; ++i) {
            double gate = 0, up = 0;
            for (int j = 0; j < c.k; ++j) {
              const double value = x[member[slot] * c.k + j];
              gate += value * w[(expert[slot] * 2 * c.size + i) * c.k + j];
              up += value * w[(expert[slot] * 2 * c.size + c.size + i) * c.k + j];
            }
            const double act = activation == ExpertActivation::kSilu
                                   ? gate * Sigmoid(gate)
                                   : gate * Sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate));
            want[slot * c.size + i] = act * up;
          }
        }
        ExpectNear(DownloadWire(type, *y), want, 1.1 * Rounding(type), 1e-4);
      }
    }
  }
}

TEST_F(CudaHybridOpsTest, GroupedProductsRefuseWhatTheyCannotDo) {
  if (!GroupsProducts(stream()).value()) GTEST_SKIP() << "the device has no tiles of so many rows";
  const auto memory = Empty(4096);
  ExpertGemmLaunch good{.x = memory->data(),
                        .w = memory->data(),
                        .y = memory->data(),
                        .tiles = As<ExpertTile>(memory),
                        .most_tiles = 1,
                        .tile_rows = kGroupedTileRows,
                        .n = 16,
                        .k = 64,
                        .experts = 1,
                        .activation = ExpertActivation::kSilu};
  const auto refused = [&](auto&& change) {
    ExpertGemmLaunch args = good;
    change(args);
    return MultiplyExperts(stream(), args).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto& args) { args.k = 56; }));
  EXPECT_TRUE(refused([](auto& args) { args.n = 24; }));
  EXPECT_TRUE(refused([](auto& args) { args.experts = 0; }));
  EXPECT_TRUE(refused([](auto& args) { args.y_is_f32 = 1; }));
  EXPECT_TRUE(refused([](auto& args) { args.bias = static_cast<const float*>(args.x); }));
  EXPECT_TRUE(refused([](auto& args) { args.tile_rows = 48; }));
}

TEST_F(CudaHybridOpsTest, ASharedExpertIsWeighedByItsGate) {
  const int rows = 3, size = 150;
  std::vector<float> h = RandomFloats(rows * size, 1), x = RandomFloats(rows * size, 2);
  const std::vector<float> w = RandomFloats(size, 3, -0.1f, 0.1f), y = RandomFloats(rows * size, 4);
  const auto dh = UploadWire(WireType::kBF16, h), dw = Upload(w), dy = Upload(y), dx = Upload(x);
  ASSERT_TRUE(GatedAdd(stream(), {.h = dh->data(),
                                  .w = As<float>(dw),
                                  .y = As<float>(dy),
                                  .x = As<float>(dx),
                                  .type = WireType::kBF16,
                                  .scale = 1.5f,
                                  .rows = rows,
                                  .h_size = size,
                                  .size = size})
                  .ok());
  std::vector<double> want(x.begin(), x.end());
  for (int row = 0; row < rows; ++row) {
    double dot = 0;
    for (int i = 0; i < size; ++i) dot += static_cast<double>(h[row * size + i]) * w[i];
    for (int i = 0; i < size; ++i) want[row * size + i] += 1.5 * Sigmoid(dot) * y[row * size + i];
  }
  ExpectNear(Download<float>(*dx), want, 1e-5, 1e-5);
}

TEST_F(CudaHybridOpsTest, WrongSizesAreRefusedBeforeAnythingRuns) {
  EXPECT_TRUE(absl::IsInvalidArgument(RouteExperts(stream(), {.rows = 1, .hidden = 8, .experts = 2, .chosen = 3})));
  EXPECT_TRUE(absl::IsInvalidArgument(RouteExperts(stream(), {.rows = 1, .hidden = 8, .experts = 1025, .chosen = 3})));
  EXPECT_TRUE(absl::IsInvalidArgument(MultiplyExperts(stream(), {.most_tiles = 1, .tile_rows = 16, .n = 8, .k = 12})));
  EXPECT_TRUE(absl::IsInvalidArgument(OutputGate(stream(), {.rows = 1, .width = 10, .size = 4})));
  EXPECT_TRUE(absl::IsInvalidArgument(StateGates(stream(), {.rows = 1, .heads = 1, .width = 4, .stride = 3})));
  EXPECT_TRUE(absl::IsInvalidArgument(GatedAdd(stream(), {.rows = 1, .h_size = 4, .size = 4})));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
