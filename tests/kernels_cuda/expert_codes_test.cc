#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/experts/expert_product.h"
#include "kernels/reference/gemm.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"
#include "tests/kernels_cuda/quant_fixture.h"

// Experts whose weights are in 4 and 8 bits against sums in double of the same dequantised values: few rows by codes,
// many by weights that are unpacked.

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;
using testing::FromE4M3;
using testing::FromWireBytes;
using testing::kQuantFormats;
using testing::QuantRowsOf;
using testing::ToWireBytes;

constexpr WireType kTypes[] = {WireType::kBF16, WireType::kF16};

double Rounding(WireType type) { return type == WireType::kBF16 ? 0x1p-8 : type == WireType::kF16 ? 0x1p-11 : 0; }
bool RoundsScales(RowFormat format) {
  return format == RowFormat::kQ4_K || format == RowFormat::kQ5_K || format == RowFormat::kQ6_K;
}

// Rows that choose experts.
struct Choice {
  int rows, experts, chosen;
  bool one_takes_all = false;  // every row chooses expert 1 alone, and no other has rows
  int pairs() const { return rows * chosen; }
};

// What comes with a product.
struct Product {
  bool gated = false;  // tiles of two halves
  ExpertActivation activation = ExpertActivation::kNone;
  bool by_row = true, biased = false, f32 = true;
};

// The weights of experts, each n x k, as a file has them and as a GPU keeps them.
struct Experts {
  CudaWeights kept;
  std::vector<float> values;  // [experts][n][k]
  int n = 0, k = 0;
  bool rounds = false;  // scales
};

class ExpertCodesTest : public testing::CudaTest {
 protected:
  // tile(t): rows of the file that are tile t's.
  static std::vector<int64_t> RowsOfTile(int64_t tile, int n, bool gated) {
    std::vector<int64_t> rows;
    const int64_t of_expert = n / kQuantTileRows, first = tile / of_expert * n, within = tile % of_expert;
    for (int64_t i = 0; i < kQuantTileRows; ++i)
      rows.push_back(first + (gated ? i / 8 * (n / 2) + within * 8 + i % 8 : within * kQuantTileRows + i));
    return rows;
  }

  Experts Keep(const RowSource& source, int experts, bool gated, WireType type) {
    Experts out;
    out.n = static_cast<int>(source.rows) / experts;
    out.k = static_cast<int>(source.cols);
    out.values = reference::DequantizeAll(source);
    out.rounds = RoundsScales(source.format);
    const CudaWeights::KeptRows rows{*QuantKindOf(source.format), source.rows, gated ? out.n : 0};
    Fill(out, rows, type, [&](const std::vector<int64_t>& of, QuantTile tile) {
      std::vector<const std::byte*> at;
      for (const int64_t row : of) at.push_back(source.row_at(row));
      PackQuantTile(source.format, source.cols, at, tile);
    });
    return out;
  }

  template <typename Pack>
  void Fill(Experts& out, const CudaWeights::KeptRows& rows, WireType type, Pack&& pack) {
    auto kept = CudaWeights::AllocateKept(device(), {&rows, 1}, out.k, type);
    ASSERT_TRUE(kept.ok()) << kept.status();
    out.kept = *std::move(kept);
    auto loader = CudaWeightLoader::Create(device());
    ASSERT_TRUE(loader.ok()) << loader.status();
    const absl::Status filled = (*loader)->FillKept(
        out.kept, 0, [&](int64_t tile, QuantTile to) { pack(RowsOfTile(tile, out.n, rows.halves_of != 0), to); });
    ASSERT_TRUE(filled.ok()) << filled;
  }

  // Where the rows' pairs are.
  struct Places {
    std::vector<int32_t> expert, slot, member;
    std::unique_ptr<Buffer> member_on_gpu, tiles;
    int most_tiles = 0;
  };
  Places Place(const Choice& choice, int tile_rows) {
    Places out;
    std::mt19937 random(9);
    out.expert.resize(choice.pairs());
    for (int row = 0; row < choice.rows; ++row) {
      std::vector<int32_t> all(choice.experts);
      std::iota(all.begin(), all.end(), 0);
      if (!choice.one_takes_all) std::shuffle(all.begin(), all.end(), random);
      for (int s = 0; s < choice.chosen; ++s) out.expert[row * choice.chosen + s] = choice.one_takes_all ? 1 : all[s];
    }
    out.most_tiles = MostExpertTiles(choice.pairs(), choice.experts, tile_rows);
    const auto expert = Upload(out.expert), slot = Empty(choice.pairs() * 4);
    out.member_on_gpu = Empty(choice.pairs() * 4);
    out.tiles = Empty(out.most_tiles * sizeof(ExpertTile));
    EXPECT_TRUE(PlaceExperts(stream(), {.expert = As<int32_t>(expert),
                                        .slot = As<int32_t>(slot),
                                        .member = As<int32_t>(out.member_on_gpu),
                                        .tiles = As<ExpertTile>(out.tiles),
                                        .pairs = choice.pairs(),
                                        .chosen = choice.chosen,
                                        .experts = choice.experts,
                                        .tile_rows = tile_rows,
                                        .most_tiles = out.most_tiles})
                    .ok());
    out.slot = Download<int32_t>(*slot);
    return out;
  }

  struct Sum {
    double value, most_off;
  };
  // Of one row of x and of w; the budget is that of the dense products (cuda_quant_test.cc).
  static Sum Multiply(const float* x, const float* w, int k, bool rounds) {
    double sum = 0, products = 0, size = 0, top = 0;
    for (int i = 0; i < k; ++i) {
      sum += double{x[i]} * w[i];
      products += std::abs(double{x[i]} * w[i]);
      size += std::abs(x[i]);
      top = std::max<double>(top, std::abs(w[i]));
    }
    return {sum, 3e-6 * size * top + (rounds ? 0x1p-11 * (products + size * top) : 0) + 2e-7 * std::abs(sum) + 1e-30};
  }
  static Sum Activated(ExpertActivation activation, const Sum& gate, const Sum& up) {
    const double g = gate.value, u = up.value;
    const double act = activation == ExpertActivation::kSilu
                           ? g / (1 + std::exp(-g))
                           : 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
    return {act * u, 1.2 * gate.most_off * (std::abs(u) + up.most_off) + std::abs(act) * up.most_off +
                         4e-6 * std::abs(act * u) + 1e-6 * std::abs(u)};
  }

  void ExpectProducts(ExpertProduct& product, const Experts& experts, const Choice& choice, const Product& what,
                      int tile_rows, WireType type) {
    const Places places = Place(choice, tile_rows);
    const int pairs = choice.pairs(), x_rows = what.by_row ? choice.rows : pairs, k = experts.k, n = experts.n;
    std::vector<float> x = RandomFloats(x_rows * k, pairs);
    const std::vector<float> bias = RandomFloats(choice.experts * n, 4);
    const std::vector<std::byte> wire = ToWireBytes(type, x);
    x = FromWireBytes(type, wire);
    const auto dx = Upload(wire), db = Upload(bias);
    const bool active = what.activation != ExpertActivation::kNone;
    const int width = active ? n / 2 : n, beyond = 3;
    const WireType y_type = what.f32 ? WireType::kF32 : type;
    const auto y = Empty((pairs * width + beyond) * testing::BytesOf(y_type));
    const ExpertGemmLaunch call{.x = dx->data(),
                                .member = what.by_row ? As<int32_t>(places.member_on_gpu) : nullptr,
                                .bias = what.biased ? As<float>(db) : nullptr,
                                .y = y->data(),
                                .type = type,
                                .y_is_f32 = what.f32,
                                .tiles = As<ExpertTile>(places.tiles),
                                .most_tiles = places.most_tiles,
                                .tile_rows = tile_rows,
                                .n = n,
                                .k = k,
                                .experts = choice.experts,
                                .activation = what.activation};
    const absl::Status status = product.Run(stream(), experts.kept, call, choice.rows);
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<float> got = FromWireBytes(y_type, Download<std::byte>(*y));
    for (int pair = 0; pair < pairs; ++pair) {
      const int slot = places.slot[pair], expert = places.expert[pair];
      const float* const row = x.data() + (what.by_row ? pair / choice.chosen : slot) * k;
      for (int i = 0; i < width; ++i) {
        const auto sum = [&](int column) {
          Sum s = Multiply(row, experts.values.data() + (int64_t{expert} * n + column) * k, k, experts.rounds);
          if (what.biased) s.value += bias[expert * n + column];
          return s;
        };
        const Sum want = active ? Activated(what.activation, sum(i), sum(i + width)) : sum(i);
        const double most = want.most_off + 2 * Rounding(y_type) * (std::abs(want.value) + 1e-3);
        ASSERT_NEAR(got[slot * width + i], want.value, most)
            << choice.rows << " rows, " << choice.experts << " experts of " << n << " x " << k << ", tiles of "
            << tile_rows << ", pair " << pair << ", column " << i;
      }
    }
    for (int i = 0; i < beyond; ++i) ASSERT_TRUE(std::isnan(got[pairs * width + i])) << "written behind the last row";
  }

  std::unique_ptr<ExpertProduct> Create(size_t scratch_bytes = 0) {
    auto product = ExpertProduct::Create(device(), scratch_bytes);
    EXPECT_TRUE(product.ok()) << product.status();
    return *std::move(product);
  }
};

TEST_F(ExpertCodesTest, FewRowsReadTheCodesOfTheExpertsThatTheyChose) {
  struct Case {
    Choice choice;
    int n, blocks;
    Product what;
  };
  const auto product = Create();
  for (const WireType type : kTypes) {
    for (const RowFormat format : kQuantFormats) {
      for (const Case& c : {Case{{1, 8, 2}, 32, 3, {.gated = true}},
                            {{5, 60, 4}, 16, 1, {.biased = true}},
                            {{9, 3, 1, true}, 48, 2, {.by_row = false}},
                            {{20, 2, 1, true}, 64, 1, {.gated = true, .biased = true, .f32 = false}},
                            {{33, 4, 3}, 16, 2, {.f32 = false}}}) {
        const int k = Info(format).block_elements * c.blocks;
        const auto file = QuantRowsOf(format, int64_t{c.choice.experts} * c.n, k, c.choice.rows);
        const Experts experts = Keep(file.source(), c.choice.experts, c.what.gated, type);
        ExpectProducts(*product, experts, c.choice, c.what, kFewTileRows, type);
        if (HasFatalFailure()) FAIL() << Info(format).name;
      }
    }
  }
}

TEST_F(ExpertCodesTest, GatesAreActivatedWhereTheyAreMultiplied) {
  const auto product = Create();
  for (const WireType type : kTypes) {
    for (const RowFormat format : kQuantFormats) {
      for (const ExpertActivation activation : {ExpertActivation::kSilu, ExpertActivation::kGeluTanh}) {
        for (const Choice& choice : {Choice{1, 4, 2}, {19, 3, 2}}) {
          const auto file = QuantRowsOf(format, int64_t{choice.experts} * 48, 256, choice.rows);
          const Experts experts = Keep(file.source(), choice.experts, /*gated=*/true, type);
          ExpectProducts(*product, experts, choice,
                         {.gated = true, .activation = activation, .biased = choice.rows > 1, .f32 = false},
                         kFewTileRows, type);
          if (HasFatalFailure()) FAIL() << Info(format).name;
        }
      }
    }
  }
}

// 16 rows of so many columns are more than a thread block's memory: eight at a time.
TEST_F(ExpertCodesTest, LongRowsAreTakenEightAtATime) {
  const auto product = Create();
  for (const RowFormat format : {RowFormat::kQ4_0, RowFormat::kQ4_K, RowFormat::kQ6_K}) {
    const Choice choice{27, 2, 1};
    const auto file = QuantRowsOf(format, int64_t{choice.experts} * 16, 7168, 3);
    const Experts experts = Keep(file.source(), choice.experts, /*gated=*/true, WireType::kBF16);
    ExpectProducts(*product, experts, choice, {.gated = true}, kFewTileRows, WireType::kBF16);
    if (HasFatalFailure()) FAIL() << Info(format).name;
  }
}

// Rounded to 16 bits on their way, as weights that are dequantised once are; some experts at a time.
TEST_F(ExpertCodesTest, ManyRowsAreMultipliedUnpacked) {
  const bool groups = GroupsProducts(stream()).value();
  for (const WireType type : kTypes) {
    for (const RowFormat format : kQuantFormats) {
      for (const int tile_rows : {kManyTileRows, kGroupedTileRows}) {
        if (tile_rows == kGroupedTileRows && !groups) continue;
        for (const bool gated : {true, false}) {
          const Choice choice{gated ? 70 : 300, 5, 2, /*one_takes_all=*/false};
          const int n = 48, k = 256;
          const auto file = QuantRowsOf(format, int64_t{choice.experts} * n, k, 7);
          Experts experts = Keep(file.source(), choice.experts, gated, type);
          experts.values = FromWireBytes(type, ToWireBytes(type, experts.values));
          const auto product = Create(size_t{2} * n * k * 2);
          const bool activates = gated;
          ExpectProducts(*product, experts, choice,
                         {.gated = gated,
                          .activation = activates ? ExpertActivation::kSilu : ExpertActivation::kNone,
                          .biased = !activates || tile_rows != kGroupedTileRows,
                          .f32 = !activates},
                         tile_rows, type);
          if (HasFatalFailure()) FAIL() << Info(format).name << (gated ? ", gated" : "");
        }
      }
    }
  }
}

TEST_F(ExpertCodesTest, OneExpertMayHaveAllRowsAndOthersNone) {
  const bool groups = GroupsProducts(stream()).value();
  for (const int tile_rows : {kManyTileRows, kGroupedTileRows}) {
    if (tile_rows == kGroupedTileRows && !groups) continue;
    const Choice choice{290, 3, 1, /*one_takes_all=*/true};
    const auto file = QuantRowsOf(RowFormat::kQ8_0, int64_t{choice.experts} * 32, 96, 7);
    Experts experts = Keep(file.source(), choice.experts, /*gated=*/false, WireType::kBF16);
    experts.values = FromWireBytes(WireType::kBF16, ToWireBytes(WireType::kBF16, experts.values));
    const auto product = Create(size_t{32} * 96 * 2);
    ExpectProducts(*product, experts, choice, {}, tile_rows, WireType::kBF16);
    if (HasFatalFailure()) return;
  }
}

TEST_F(ExpertCodesTest, E4M3WithScalesOfRows) {
  const auto product = Create();
  for (const bool gated : {true, false}) {
    const Choice choice{18, 3, 2};
    Experts experts;
    experts.n = 32, experts.k = 200;
    const int64_t rows = choice.experts * experts.n, k = experts.k;
    std::mt19937_64 random(5);
    std::vector<std::byte> bytes(rows * k);
    for (std::byte& b : bytes) {
      b = static_cast<std::byte>(random());
      if ((b & std::byte{0x7f}) == std::byte{0x7f}) b = std::byte{0x3};
    }
    const std::vector<float> scales = RandomFloats(rows, 8, 0.001f, 0.01f);
    for (int64_t i = 0; i < rows * k; ++i)
      experts.values.push_back(FromE4M3(static_cast<uint8_t>(bytes[i])) * scales[i / k]);
    const CudaWeights::KeptRows kept{QuantKind::kE4M3, rows, gated ? experts.n : 0};
    Fill(experts, kept, WireType::kF16, [&](const std::vector<int64_t>& of, QuantTile tile) {
      std::vector<const std::byte*> at;
      std::vector<float> of_rows;
      for (const int64_t row : of) at.push_back(bytes.data() + row * k), of_rows.push_back(scales[row]);
      PackE4M3Tile(k, at, of_rows, tile);
    });
    ExpectProducts(*product, experts, choice, {.gated = gated, .f32 = false}, kFewTileRows, WireType::kF16);
    if (HasFatalFailure()) return;
  }
}

TEST_F(ExpertCodesTest, WhatDoesNotFitIsRefused) {
  EXPECT_TRUE(FitsExpertCodes(16, 8192));
  EXPECT_FALSE(FitsExpertCodes(24, 64)) << "an expert begins within a tile";
  EXPECT_FALSE(FitsExpertCodes(16, 8200)) << "rows are too long";
  const auto file = QuantRowsOf(RowFormat::kQ8_0, 4 * 32, 64, 3);
  const Experts plain = Keep(file.source(), 4, false, WireType::kBF16),
                gated = Keep(file.source(), 4, true, WireType::kBF16);
  const auto memory = Empty(4096);
  const auto product = Create();
  const ExpertGemmLaunch good{.x = memory->data(),
                              .y = memory->data(),
                              .tiles = As<ExpertTile>(memory),
                              .most_tiles = 1,
                              .tile_rows = kFewTileRows,
                              .n = 32,
                              .k = 64,
                              .experts = 4};
  const auto refused = [&](const Experts& experts, auto&& change) {
    ExpertGemmLaunch call = good;
    change(call);
    return absl::IsInvalidArgument(product->Run(stream(), experts.kept, call, 1));
  };
  EXPECT_TRUE(refused(plain, [](auto& call) { call.experts = 3; }));
  EXPECT_TRUE(refused(plain, [](auto& call) { call.x = nullptr; }));
  EXPECT_TRUE(refused(plain, [](auto& call) { call.activation = ExpertActivation::kSilu; })) << "tiles have no halves";
  EXPECT_TRUE(refused(plain, [](auto& call) { call.tile_rows = kManyTileRows; })) << "no memory to unpack them";
  EXPECT_TRUE(refused(gated, [](auto& call) { call.activation = ExpertActivation::kSilu, call.y_is_f32 = 1; }));
  const CudaWeights::KeptRows odd{QuantKind::kU8, 40, 32};
  EXPECT_TRUE(absl::IsInvalidArgument(CudaWeights::AllocateKept(device(), {&odd, 1}, 64, WireType::kBF16).status()));
}

TEST(ExpertScratch, HasRoomForAllExpertsOrForAsManyAsThereIsMemory) {
  EXPECT_EQ(ExpertProduct::ScratchBytes(4, 32, 64), size_t{4} * 32 * 64 * 2);
  const size_t each = size_t{1536} * 2048 * 2;  // Qwen3-30B-A3B's
  EXPECT_EQ(ExpertProduct::ScratchBytes(128, 1536, 2048), ExpertProduct::kMostScratchBytes / each * each);
  EXPECT_EQ(ExpertProduct::ScratchBytes(2, 1 << 15, 1 << 14), size_t{1} << 30) << "one, however large";
}

}  // namespace
}  // namespace dovetail::kernels::cuda
