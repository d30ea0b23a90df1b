#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/products/quant_ops.h"
#include "kernels/reference/gemm.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"
#include "tests/kernels_cuda/quant_fixture.h"

// Weights in 4 and 8 bits against the double reference on the same dequantised values.

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

class CudaQuantTest : public testing::CudaTest {
 protected:
  std::unique_ptr<Buffer> UploadWire(WireType type, std::vector<float>& x) {
    const std::vector<std::byte> bytes = ToWireBytes(type, x);
    x = FromWireBytes(type, bytes);
    return Upload(bytes);
  }

  // What one element may be off: f32 sums, the roundings of scales, and of the result.
  struct Budget {
    const std::vector<float>& w;
    std::vector<float> top;  // largest weight of each row
    Budget(const std::vector<float>& weights, int64_t n, int64_t k) : w(weights), top(n) {
      for (int64_t i = 0; i < n * k; ++i) top[i / k] = std::max(top[i / k], std::abs(w[i]));
    }
    double Of(const float* x, int64_t row, int64_t k, bool rounds) const {
      double products = 0, size = 0;
      for (int64_t i = 0; i < k; ++i) {
        products += std::abs(static_cast<double>(x[i]) * w[row * k + i]);
        size += std::abs(x[i]);
      }
      return 3e-6 * size * top[row] + (rounds ? 0x1p-11 * (products + size * top[row]) : 0) + 1e-30;
    }
  };

  void ExpectProduct(const CudaWeights& weights, const std::vector<float>& w, bool rounds, WireType type, int64_t m,
                     bool f32, bool accumulate, bool biased, CudaProduct& product, const std::string& what) {
    const int64_t n = weights.rows(), k = weights.cols(), stride = n + 3;
    std::vector<float> x = RandomFloats(m * k, static_cast<int>(m * 7 + k)), y0 = RandomFloats(m * stride, 3),
                       bias = RandomFloats(n, 4);
    const WireType y_type = f32 ? WireType::kF32 : type;
    const auto dx = UploadWire(type, x), dy = UploadWire(y_type, y0), db = UploadWire(y_type, bias);
    GemmCall call{};
    call.x = dx->data();
    call.y = dy->data();
    call.bias = biased ? db->data() : nullptr;
    call.m = m, call.n = n, call.k = k;
    call.x_stride = k, call.y_stride = stride;
    call.type = type == WireType::kBF16 ? GemmType::kBF16 : GemmType::kF16;
    call.y_is_f32 = f32, call.accumulate = accumulate;
    const absl::Status status = product.Run(stream(), weights, call);
    ASSERT_TRUE(status.ok()) << status;
    const auto got = FromWireBytes(y_type, Download<std::byte>(*dy));
    const auto want = reference::Gemm(x, w, m, n, k);
    const Budget budget(w, n, k);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t i = 0; i < n; ++i) {
        const double added = (accumulate ? y0[row * stride + i] : 0.0f) + (biased ? bias[i] : 0.0f);
        const double target = want[row * n + i] + added;
        const double most = budget.Of(x.data() + row * k, i, k, rounds) + 2e-7 * std::abs(target) +
                            2 * Rounding(y_type) * (std::abs(target) + 1e-3);
        ASSERT_NEAR(got[row * stride + i], target, most)
            << what << ", " << m << " x " << n << " x " << k << " at " << row << ", " << i;
      }
      for (int64_t i = n; i < stride; ++i) ASSERT_EQ(got[row * stride + i], y0[row * stride + i]) << what;
    }
  }

  std::unique_ptr<CudaProduct> Product() {
    auto product = CudaProduct::Create(device(), /*keeps=*/true);
    if (!product.ok() && absl::IsFailedPrecondition(product.status())) return nullptr;
    EXPECT_TRUE(product.ok()) << product.status();
    return *std::move(product);
  }
};

TEST_F(CudaQuantTest, FewRowsAreMultipliedAsTheyAreKept) {
  const auto product = Product();
  if (product == nullptr) GTEST_SKIP() << "needs cuBLASLt";
  for (const WireType type : kTypes) {
    for (const RowFormat format : kQuantFormats) {
      for (const auto& [m, n, blocks] : {std::tuple{1, 16, 1},
                                         {1, 200, 5},
                                         {2, 40, 2},
                                         {3, 7, 3},
                                         {7, 320, 2},
                                         {8, 64, 6},
                                         {9, 33, 3},
                                         {16, 2200, 2},
                                         {17, 48, 4},
                                         {64, 130, 2}}) {
        const int64_t k = Info(format).block_elements * blocks;
        const auto file = QuantRowsOf(format, n, k, m);
        auto weights = CudaWeights::Keep(device(), file.source(), type);
        ASSERT_TRUE(weights.ok()) << weights.status();
        const auto w = reference::DequantizeAll(file.source());
        const bool f32 = m % 2 == 1;
        ExpectProduct(*weights, w, RoundsScales(format), type, m, f32, m % 3 == 0, m % 4 == 1, *product,
                      Info(format).name);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Columns that do not all fit into shared memory: ranges of them, added up in f32; in 16 bits fewer rows at a time, or
// unpacked weights, which are rounded on their way.
TEST_F(CudaQuantTest, LongRowsGoInRangesOfColumns) {
  const auto product = Product();
  if (product == nullptr) GTEST_SKIP() << "needs cuBLASLt";
  for (const RowFormat format : {RowFormat::kQ4_0, RowFormat::kQ4_K, RowFormat::kQ6_K}) {
    for (const auto& [m, k] : {std::pair{16, 14336}, {8, 14336}, {12, 8192}, {1, 28672}}) {
      const auto file = QuantRowsOf(format, 36, k, m);
      auto weights = CudaWeights::Keep(device(), file.source(), WireType::kBF16);
      ASSERT_TRUE(weights.ok()) << weights.status();
      const auto w = reference::DequantizeAll(file.source());
      const auto rounded = FromWireBytes(WireType::kBF16, ToWireBytes(WireType::kBF16, w));
      for (const bool f32 : {false, true}) {
        ExpectProduct(*weights, !f32 && m > 1 && k > 10000 ? rounded : w, RoundsScales(format), WireType::kBF16, m, f32,
                      f32, true, *product, Info(format).name);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaQuantTest, ManyRowsAreMultipliedUnpacked) {
  const auto product = Product();
  if (product == nullptr) GTEST_SKIP() << "needs cuBLASLt";
  for (const WireType type : kTypes) {
    for (const RowFormat format : kQuantFormats) {
      const int64_t m = 72, n = 176, k = 512;
      const auto file = QuantRowsOf(format, n, k, 5);
      auto weights = CudaWeights::Keep(device(), file.source(), type);
      ASSERT_TRUE(weights.ok()) << weights.status();
      // Rounded to 16 bits on their way, as weights that are dequantised once are.
      const auto w = FromWireBytes(type, ToWireBytes(type, reference::DequantizeAll(file.source())));
      ExpectProduct(*weights, w, /*rounds=*/RoundsScales(format), type, m, true, false, false, *product,
                    Info(format).name);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaQuantTest, E4M3WithScalesOfRows) {
  const auto product = Product();
  if (product == nullptr) GTEST_SKIP() << "needs cuBLASLt";
  for (const WireType type : kTypes) {
    for (const auto& [m, n, k] : {std::tuple{1, 40, 136}, {5, 200, 576}, {16, 33, 1024}, {80, 64, 256}}) {
      const CudaWeights::KeptRows part{QuantKind::kE4M3, n};
      auto weights = CudaWeights::AllocateKept(device(), {&part, 1}, k, type);
      ASSERT_TRUE(weights.ok()) << weights.status();
      auto loader = CudaWeightLoader::Create(device());
      ASSERT_TRUE(loader.ok()) << loader.status();
      std::mt19937_64 random(m);
      std::vector<std::byte> bytes(n * k);
      for (std::byte& b : bytes) {
        b = static_cast<std::byte>(random());
        if ((b & std::byte{0x7f}) == std::byte{0x7f}) b = std::byte{0x3};
      }
      std::vector<float> scales = RandomFloats(n, 8, 0.001f, 0.01f), w(n * k);
      for (int64_t i = 0; i < n * k; ++i) w[i] = FromE4M3(static_cast<uint8_t>(bytes[i])) * scales[i / k];
      const absl::Status filled = (*loader)->FillKept(*weights, 0, [&](int64_t tile, QuantTile out) {
        std::vector<const std::byte*> rows;
        for (int64_t r = 16 * tile; r < std::min<int64_t>(n, 16 * tile + 16); ++r) rows.push_back(bytes.data() + r * k);
        PackE4M3Tile(k, rows, std::span(scales).subspan(16 * tile, rows.size()), out);
      });
      ASSERT_TRUE(filled.ok()) << filled;
      if (m > CudaProduct::kMostKeptRows) w = FromWireBytes(type, ToWireBytes(type, w));
      ExpectProduct(*weights, w, false, type, m, true, false, m == 5, *product, "E4M3");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaQuantTest, PartsOfDifferentFormatsStandBelowEachOther) {
  const auto product = Product();
  if (product == nullptr) GTEST_SKIP() << "needs cuBLASLt";
  const int64_t k = 512;
  const auto upper = QuantRowsOf(RowFormat::kQ4_K, 48, k, 1), lower = QuantRowsOf(RowFormat::kQ6_K, 24, k, 2);
  const CudaWeights::KeptRows parts[] = {{QuantKind::kU4Offset, 48}, {QuantKind::kU8Group16, 24}};
  auto weights = CudaWeights::AllocateKept(device(), parts, k, WireType::kBF16);
  ASSERT_TRUE(weights.ok()) << weights.status();
  auto loader = CudaWeightLoader::Create(device());
  ASSERT_TRUE(loader.ok()) << loader.status();
  std::vector<float> w;
  for (size_t part = 0; part < 2; ++part) {
    const RowSource source = part == 0 ? upper.source() : lower.source();
    const absl::Status filled = (*loader)->FillKept(*weights, part, [&](int64_t tile, QuantTile out) {
      std::vector<const std::byte*> rows;
      for (int64_t r = 16 * tile; r < std::min(source.rows, 16 * tile + 16); ++r) rows.push_back(source.row_at(r));
      PackQuantTile(source.format, k, rows, out);
    });
    ASSERT_TRUE(filled.ok()) << filled;
    const auto values = reference::DequantizeAll(source);
    w.insert(w.end(), values.begin(), values.end());
  }
  for (const int64_t m : {3, 70}) {
    const auto seen =
        m > CudaProduct::kMostKeptRows ? FromWireBytes(WireType::kBF16, ToWireBytes(WireType::kBF16, w)) : w;
    ExpectProduct(*weights, seen, true, WireType::kBF16, m, m == 70, false, true, *product, "parts");
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaQuantTest, EmbeddingsAreRowsTimesAFactor) {
  for (const RowFormat format : kQuantFormats) {
    const int64_t vocab = 50, size = Info(format).block_elements * 2;
    const auto file = QuantRowsOf(format, vocab, size, 9);
    auto table = CudaWeights::Keep(device(), file.source(), WireType::kBF16);
    ASSERT_TRUE(table.ok()) << table.status();
    const auto w = reference::DequantizeAll(file.source());
    const std::vector<int32_t> ids = {49, 0, -2, 7};
    const std::vector<SampleOutput> drawn = {{.token = 1}, {.token = 33}};
    const auto di = Upload(ids), dd = Upload(drawn), out = Empty(ids.size() * size * 4);
    QuantEmbedLaunch args;
    args.w = table->kept()[0].matrix;
    args.ids = As<int32_t>(di);
    args.drawn = As<SampleOutput>(dd);
    args.out = out->data();
    args.out_type = WireType::kF32;
    args.factor = 3;
    args.rows = 4;
    const absl::Status status = EmbedQuant(stream(), args);
    ASSERT_TRUE(status.ok()) << status;
    const auto got = Download<float>(*out);
    const int tokens[] = {49, 0, 33, 7};
    for (int r = 0; r < 4; ++r) {
      float top = 0;
      for (int64_t i = 0; i < size; ++i) top = std::max(top, std::abs(w[tokens[r] * size + i]));
      for (int64_t i = 0; i < size; ++i) {
        const double want = 3.0 * w[tokens[r] * size + i];
        ASSERT_NEAR(got[r * size + i], want, RoundsScales(format) ? 0x1p-9 * 3 * top : 2e-6 * 3 * top)
            << Info(format).name;
      }
    }
  }
}

// NaN and infinity in one row of x reach that row's results, and no others.
TEST_F(CudaQuantTest, NaNStaysInItsRow) {
  const int64_t m = 4, n = 32, k = 256;
  const auto file = QuantRowsOf(RowFormat::kQ8_0, n, k, 3);
  auto weights = CudaWeights::Keep(device(), file.source(), WireType::kBF16);
  ASSERT_TRUE(weights.ok()) << weights.status();
  std::vector<float> x = RandomFloats(m * k, 1);
  x[2 * k + 5] = std::numeric_limits<float>::quiet_NaN();
  const auto dx = Upload(ToWireBytes(WireType::kBF16, x)), dy = Empty(m * n * 4);
  QuantGemmLaunch args;
  args.w = weights->kept()[0].matrix;
  args.x = dx->data();
  args.y = dy->data();
  args.x_stride = k, args.y_stride = n, args.m = m, args.y_is_f32 = 1;
  ASSERT_TRUE(MultiplyQuant(stream(), args).ok());
  const auto got = Download<float>(*dy);
  for (int64_t i = 0; i < m * n; ++i) ASSERT_EQ(std::isnan(got[i]), i / n == 2) << i;
}

TEST_F(CudaQuantTest, RefuseWhatDoesNotFit) {
  const auto file = QuantRowsOf(RowFormat::kQ8_0, 16, 64, 3);
  auto weights = CudaWeights::Keep(device(), file.source(), WireType::kBF16);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto memory = Empty(1024);
  QuantGemmLaunch args;
  args.w = weights->kept()[0].matrix;
  args.m = 1, args.x_stride = 64, args.y_stride = 16;
  EXPECT_EQ(MultiplyQuant(stream(), args).code(), absl::StatusCode::kInvalidArgument) << "no x";
  args.x = memory->data() + 2, args.y = memory->data();
  EXPECT_EQ(MultiplyQuant(stream(), args).code(), absl::StatusCode::kInvalidArgument) << "x is not aligned";
  args.x = memory->data(), args.y_stride = 15;
  EXPECT_EQ(MultiplyQuant(stream(), args).code(), absl::StatusCode::kInvalidArgument) << "rows of y overlap";
  const float values[64] = {};
  const auto row_at = [&](int64_t) { return reinterpret_cast<const std::byte*>(values); };
  EXPECT_EQ(
      CudaWeights::Keep(device(), {.format = RowFormat::kF32, .rows = 1, .cols = 64, .row_at = row_at}, WireType::kBF16)
          .status()
          .code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
