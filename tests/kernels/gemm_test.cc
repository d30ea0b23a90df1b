#include "kernels/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/dtype.h"
#include "kernels/cpu/isa.h"
#include "kernels/reference/gemm.h"
#include "tests/kernels/gemm_matrices.h"

namespace dovetail::kernels {
namespace {

using test::RandomActivations;
using test::RawMatrix;
using test::RelativeRms;

// A row format and what it is packed into.
struct Case {
  RowFormat from;
  PackedFormat to;
  ActivationBits bits;
  double tight;   // relative RMS against the double-precision product of what the kernel sees
  double budget;  // relative RMS against the double-precision product of x itself
};

constexpr double kF32Sum = 1e-6;  // f32 sums over a few hundred terms
// Rounding x to a 127th, or a 32512th, of the largest of its group. Outliers of 20 sigma are in
// the test's activations.
constexpr double kBits8 = 1.2e-2, kBits16 = 5e-5;
// Rounding weights to bf16, in the smallest matrices and in one of a usual size.
constexpr double kBF16Tiny = 3e-3, kBF16 = 2e-3;

constexpr ActivationBits kB8 = ActivationBits::k8, kB16 = ActivationBits::k16;

const Case kCases[] = {
    {RowFormat::kF32, PackedFormat::kF32, kB8, kF32Sum, kF32Sum},
    {RowFormat::kF16, PackedFormat::kF32, kB8, kF32Sum, kF32Sum},
    {RowFormat::kF16, PackedFormat::kBF16, kB8, kBF16Tiny,
     2.5e-3},  // rounding the weights shows in the tight budget too
    {RowFormat::kF16, PackedFormat::kBF16, kB16, kBF16Tiny, kBF16},
    {RowFormat::kBF16, PackedFormat::kBF16, kB8, kF32Sum, 2e-3},
    {RowFormat::kBF16, PackedFormat::kBF16, kB16, kF32Sum, kF32Sum},
    {RowFormat::kQ4_0, PackedFormat::kU4Symmetric, kB8, kF32Sum, kBits8},
    {RowFormat::kQ4_0, PackedFormat::kU4Symmetric, kB16, kF32Sum, kBits16},
    {RowFormat::kQ4_1, PackedFormat::kU4Affine, kB8, kF32Sum, kBits8},
    {RowFormat::kQ4_1, PackedFormat::kU4Affine, kB16, kF32Sum, kBits16},
    {RowFormat::kQ5_0, PackedFormat::kU8Symmetric, kB8, kF32Sum, kBits8},
    {RowFormat::kQ5_0, PackedFormat::kU8Symmetric, kB16, kF32Sum, kBits16},
    {RowFormat::kQ5_1, PackedFormat::kU8Affine, kB8, kF32Sum, kBits8},
    {RowFormat::kQ5_1, PackedFormat::kU8Affine, kB16, kF32Sum, kBits16},
    {RowFormat::kQ8_0, PackedFormat::kU8Symmetric, kB8, kF32Sum, kBits8},
    {RowFormat::kQ8_0, PackedFormat::kU8Symmetric, kB16, kF32Sum, kBits16},
    {RowFormat::kQ4_K, PackedFormat::kU4AffineF32, kB8, kF32Sum, kBits8},
    {RowFormat::kQ4_K, PackedFormat::kU4AffineF32, kB16, kF32Sum, kBits16},
    {RowFormat::kQ5_K, PackedFormat::kU8AffineF32, kB8, kF32Sum, kBits8},
    {RowFormat::kQ5_K, PackedFormat::kU8AffineF32, kB16, kF32Sum, kBits16},
    {RowFormat::kQ6_K, PackedFormat::kU8SymmetricG16, kB8, kF32Sum, kBits8},
    {RowFormat::kQ6_K, PackedFormat::kU8SymmetricG16, kB16, kF32Sum, kBits16},
    {RowFormat::kMXFP4, PackedFormat::kFp4, kB8, kF32Sum, kBits8},
    {RowFormat::kMXFP4, PackedFormat::kFp4, kB16, kF32Sum, kBits16},
    {RowFormat::kMXFP4, PackedFormat::kF32, kB8, kF32Sum, kF32Sum},
    {RowFormat::kQ4_1, PackedFormat::kF32, kB8, kF32Sum, kF32Sum},
    {RowFormat::kQ6_K, PackedFormat::kBF16, kB8, kBF16Tiny, 2.5e-3},
    {RowFormat::kQ6_K, PackedFormat::kBF16, kB16, kBF16Tiny, kBF16},
};

std::string CaseName(const testing::TestParamInfo<std::tuple<Case, Isa>>& info) {
  const auto& [c, isa] = info.param;
  std::string name =
      std::string(Info(c.from).name) + "_as_" + Name(c.to) + "_" + (c.bits == kB16 ? "a16_" : "") + Name(isa);
  for (char& ch : name) {
    if (ch == '-') ch = '_';
  }
  return name;
}

// A stream with its device; threads share no more than the machine has, so that a test does not
// depend on it.
struct Cpu {
  Cpu(Isa isa, int threads)
      : device(CreateCpuDevice({.threads = threads, .max_isa = isa}).value()), stream(device->CreateStream()) {}
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
};

constexpr float kSentinel = 12345.0f;

// y = x W^T with guards around y; checks that the guards survived. Result [m, rows] without the
// guards.
std::vector<float> RunGemm(Cpu& cpu, const PackedWeights& w, const std::vector<float>& x, int64_t m,
                           ActivationBits bits = kB8, const float* bias = nullptr) {
  constexpr int64_t kGuard = 5;
  const int64_t stride = w.rows() + kGuard;
  std::vector<float> y(m * stride + kGuard, kSentinel);
  AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(m, w.cols()) + 64).value();
  const size_t need = GemmScratchBytes(m, w.cols());
  std::memset(scratch.data(), 0x5a, scratch.size_bytes());
  const GemmOutput output{.weights = &w, .y = y.data() + kGuard, .y_stride = stride, .bias = bias, .activations = bits};
  const absl::Status status = Gemm(
      {.x = x.data(), .x_stride = w.cols(), .m = m, .outputs = {&output, 1}, .scratch = scratch.bytes().first(need)},
      *cpu.stream);
  EXPECT_TRUE(status.ok()) << status;
  for (size_t i = need; i < scratch.size_bytes(); ++i)
    EXPECT_EQ(scratch.data()[i], std::byte{0x5a}) << "beyond the scratch";
  std::vector<float> result;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < kGuard; ++j) EXPECT_EQ(y[i * stride + j], kSentinel) << "before row " << i;
    result.insert(result.end(), y.begin() + i * stride + kGuard, y.begin() + (i + 1) * stride);
  }
  for (int64_t j = 0; j < kGuard; ++j) EXPECT_EQ(y[m * stride + j], kSentinel) << "behind the last row";
  return result;
}

class GemmFormats : public testing::TestWithParam<std::tuple<Case, Isa>> {
 protected:
  void SetUp() override {
    if (DetectIsa().value() < isa()) GTEST_SKIP() << "this CPU lacks " << Name(isa());
  }
  const Case& format() const { return std::get<0>(GetParam()); }
  Isa isa() const { return std::get<1>(GetParam()); }
  // The smallest width that every format takes, and two blocks of the others.
  int64_t SomeCols() const { return Info(format().from).block_elements == 256 ? 512 : 96; }
};

TEST_P(GemmFormats, StaysWithinTheErrorBudgetForRaggedShapes) {
  Cpu cpu(isa(), 2);
  const int block = Info(format().from).block_elements;
  const std::vector<int64_t> widths = block == 1 && !IsQuantized(format().to)
                                          ? std::vector<int64_t>{1, 7, 33, 257}
                                          : std::vector<int64_t>{block, 3 * int64_t{block}};
  for (const int64_t cols : widths) {
    for (const int64_t rows : {1, 15, 16, 17, 75}) {
      const RawMatrix matrix(format().from, rows, cols, 7 + rows);
      const PackedWeights w = PackWeights(format().to, matrix.source(), nullptr).value();
      const std::vector<float> dense = reference::DequantizeAll(matrix.source());
      for (const int64_t m : {1, 2, 3, 5, 8, 13}) {
        const std::vector<float> x = RandomActivations(m * cols, 11 + m);
        const std::vector<float> seen = reference::AsActivations(format().to, format().bits, x, m, cols);
        const std::vector<float> y = RunGemm(cpu, w, x, m, format().bits);
        // Cancellation may leave a single output far below its terms: errors are judged against
        // matrices, not single numbers.
        if (rows < 15) continue;
        EXPECT_LE(RelativeRms(y.data(), rows, reference::Gemm(seen, dense, m, rows, cols), m, rows), format().tight)
            << rows << " x " << cols << ", m = " << m;
      }
    }
  }
}

TEST_P(GemmFormats, IsCloseToTheExactProduct) {
  Cpu cpu(isa(), 2);
  const int64_t rows = 64, cols = 768, m = 16;
  const RawMatrix matrix(format().from, rows, cols, 3);
  const PackedWeights w = PackWeights(format().to, matrix.source(), nullptr).value();
  const std::vector<float> x = RandomActivations(m * cols, 5);
  const std::vector<float> y = RunGemm(cpu, w, x, m, format().bits);
  const std::vector<double> exact = reference::Gemm(x, reference::DequantizeAll(matrix.source()), m, rows, cols);
  const double error = RelativeRms(y.data(), rows, exact, m, rows);
  RecordProperty("relative_rms", std::to_string(error));
  EXPECT_LE(error, format().budget);
}

TEST_P(GemmFormats, GivesARowTheSameBitsInAnyBatchOnAnyNumberOfThreads) {
  const int64_t rows = 203, cols = 3 * SomeCols(), m = 29;
  const RawMatrix matrix(format().from, rows, cols, 21);
  const PackedWeights w = PackWeights(format().to, matrix.source(), nullptr).value();
  const std::vector<float> x = RandomActivations(m * cols, 22);
  Cpu alone(isa(), 1);
  std::vector<float> one_by_one;
  for (int64_t i = 0; i < m; ++i) {
    const std::vector<float> y =
        RunGemm(alone, w, {x.begin() + i * cols, x.begin() + (i + 1) * cols}, 1, format().bits);
    one_by_one.insert(one_by_one.end(), y.begin(), y.end());
  }
  for (const int threads : {1, 2, 3}) {
    Cpu cpu(isa(), threads);
    for (int64_t batch = 1; batch <= m; ++batch) {
      const int64_t first = (batch * 5) % (m - batch + 1);  // the row's neighbours change too
      const std::vector<float> y =
          RunGemm(cpu, w, {x.begin() + first * cols, x.begin() + (first + batch) * cols}, batch, format().bits);
      ASSERT_EQ(std::memcmp(y.data(), one_by_one.data() + first * rows, y.size() * sizeof(float)), 0)
          << "batch " << batch << ", threads " << threads;
    }
  }
}

TEST_P(GemmFormats, KeepsNanAndInfinityInTheirRows) {
  Cpu cpu(isa(), 2);
  const int64_t rows = 33, cols = SomeCols(), m = 9;
  const RawMatrix matrix(format().from, rows, cols, 31);
  const PackedWeights w = PackWeights(format().to, matrix.source(), nullptr).value();
  std::vector<float> x = RandomActivations(m * cols, 32);
  const std::vector<float> clean = RunGemm(cpu, w, x, m, format().bits);
  x[2 * cols + 17] = std::numeric_limits<float>::quiet_NaN();
  x[6 * cols + 1] = std::numeric_limits<float>::infinity();
  const std::vector<float> y = RunGemm(cpu, w, x, m, format().bits);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < rows; ++j) {
      if (i == 2) {
        EXPECT_TRUE(std::isnan(y[i * rows + j])) << j;
      } else if (i == 6) {
        EXPECT_FALSE(std::isfinite(y[i * rows + j])) << j;
      } else {
        EXPECT_EQ(y[i * rows + j], clean[i * rows + j]) << i << " " << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GemmFormats,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::Values(Isa::kAvx2, Isa::kAvx512, Isa::kAmx)),
                         CaseName);

class GemmIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (DetectIsa().value() < GetParam()) GTEST_SKIP() << "this CPU lacks " << Name(GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(All, GemmIsa, testing::Values(Isa::kAvx2, Isa::kAvx512, Isa::kAmx),
                         [](const auto& info) { return std::string(Name(info.param)); });

// Weight code 255 (or 0), activation 127: the sums that saturate in vpmaddubsw.
TEST_P(GemmIsa, SumsTheLargestCodesExactly) {
  Cpu cpu(GetParam(), 1);
  constexpr int64_t kCols = 64;
  std::vector<BlockQ8_0> blocks(2 * kCols / 32);
  for (size_t b = 0; b < blocks.size(); ++b) {
    blocks[b].d = ToF16(1.0f).bits;
    for (int8_t& q : blocks[b].qs) q = b < 2 ? 127 : -128;
  }
  const auto row_at = [&](int64_t row) { return reinterpret_cast<const std::byte*>(&blocks[row * 2]); };
  const PackedWeights w =
      PackWeights(PackedFormat::kU8Symmetric, {RowFormat::kQ8_0, 2, kCols, row_at}, nullptr).value();
  EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(kCols, 127.0f), 1),
              testing::ElementsAre(64.0f * 127 * 127, -64.0f * 127 * 128));
  EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(kCols, -127.0f), 1),
              testing::ElementsAre(-64.0f * 127 * 127, 64.0f * 127 * 128));
  // The same with both planes: each group's sum is exact and a power of two times a small number.
  EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(kCols, 32512.0f), 1, kB16),
              testing::ElementsAre(64.0f * 127 * 32512, -64.0f * 128 * 32512));
  EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(kCols, -32512.0f), 1, kB16),
              testing::ElementsAre(-64.0f * 127 * 32512, 64.0f * 128 * 32512));
}

// In a group with a value of 127 * 256, integers are their own codes: 127 in the low plane, 128 and more
// carry into the high one.
TEST_P(GemmIsa, JoinsTheTwoPlanesOfAnActivationExactly) {
  Cpu cpu(GetParam(), 1);
  constexpr int64_t kCols = 32;
  BlockQ8_0 block{.d = ToF16(1.0f).bits, .qs = {}};
  block.qs[1] = 3;
  const auto row_at = [&](int64_t) { return reinterpret_cast<const std::byte*>(&block); };
  const PackedWeights w =
      PackWeights(PackedFormat::kU8Symmetric, {RowFormat::kQ8_0, 1, kCols, row_at}, nullptr).value();
  for (const float value : {0.0f, 1.0f, 127.0f, 128.0f, 129.0f, 255.0f, 256.0f, 12345.0f, 32511.0f, -1.0f, -127.0f,
                            -128.0f, -129.0f, -256.0f, -12345.0f, -32512.0f}) {
    std::vector<float> x(kCols, 0.0f);
    x[0] = 32512.0f;
    x[1] = value;
    EXPECT_THAT(RunGemm(cpu, w, x, 1, kB16), testing::ElementsAre(3 * value));
  }
}

TEST_P(GemmIsa, KeepsWhatStandsBesideAnOutlierWithSixteenBitsOnly) {
  Cpu cpu(GetParam(), 2);
  const int64_t rows = 64, cols = 256;
  const RawMatrix matrix(RowFormat::kQ4_1, rows, cols, 81);
  const PackedWeights w = PackWeights(PackedFormat::kU4Affine, matrix.source(), nullptr).value();
  std::vector<float> x(cols);
  for (int64_t k = 0; k < cols; ++k) x[k] = 2 * std::sin(static_cast<float>(k));
  for (int64_t g = 0; g < cols; g += 32) x[g] = 1000.0f;
  // What the other 31 contribute: the difference to the outliers alone.
  std::vector<float> outliers(cols, 0.0f), others = x;
  for (int64_t g = 0; g < cols; g += 32) {
    outliers[g] = 1000.0f;
    others[g] = 0.0f;
  }
  const std::vector<double> exact = reference::Gemm(others, reference::DequantizeAll(matrix.source()), 1, rows, cols);
  const auto error = [&](ActivationBits bits) {
    std::vector<float> y = RunGemm(cpu, w, x, 1, bits);
    const std::vector<float> of_outliers = RunGemm(cpu, w, outliers, 1, bits);
    for (int64_t i = 0; i < rows; ++i) y[i] -= of_outliers[i];
    return RelativeRms(y.data(), rows, exact, 1, rows);
  };
  EXPECT_GT(error(kB8), 0.9);  // steps of 7.9: nothing is left
  // Steps of 0.031, 0.0089 RMS against 1.4: 0.0063, and the products of the sines cancel to half of
  // what noise would add up to.
  EXPECT_LT(error(kB16), 2e-2);
}

TEST_P(GemmIsa, AddsBiasAndResidualAfterTheProduct) {
  Cpu cpu(GetParam(), 2);
  const int64_t rows = 37, cols = 64, m = 6;
  const RawMatrix matrix(RowFormat::kQ4_1, rows, cols, 41);
  const PackedWeights w = PackWeights(PackedFormat::kU4Affine, matrix.source(), nullptr).value();
  const std::vector<float> x = RandomActivations(m * cols, 42), bias = RandomActivations(rows, 43);
  const std::vector<float> plain = RunGemm(cpu, w, x, m), biased = RunGemm(cpu, w, x, m, kB8, bias.data());
  std::vector<float> y = RandomActivations(m * rows, 44);
  const std::vector<float> before = y;
  AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(m, cols)).value();
  const GemmOutput output{.weights = &w, .y = y.data(), .y_stride = rows, .bias = bias.data(), .accumulate = true};
  ASSERT_TRUE(
      Gemm({.x = x.data(), .x_stride = cols, .m = m, .outputs = {&output, 1}, .scratch = scratch.bytes()}, *cpu.stream)
          .ok());
  for (int64_t i = 0; i < m * rows; ++i) {
    EXPECT_EQ(biased[i], plain[i] + bias[i % rows]);
    EXPECT_EQ(y[i], before[i] + biased[i]);
  }
}

TEST_P(GemmIsa, GivesOutputsThatShareAnInputTheBitsTheyHaveAlone) {
  Cpu cpu(GetParam(), 2);
  const int64_t cols = 256, m = 11;
  const RawMatrix q(RowFormat::kQ4_K, 100, cols, 51), k(RowFormat::kF16, 33, cols, 52),
      v(RowFormat::kQ6_K, 48, cols, 53), o(RowFormat::kF32, 5, cols, 54);
  const PackedWeights weights[] = {PackWeights(PackedFormat::kU4AffineF32, q.source(), nullptr).value(),
                                   PackWeights(PackedFormat::kBF16, k.source(), nullptr).value(),
                                   PackWeights(PackedFormat::kU8SymmetricG16, v.source(), nullptr).value(),
                                   PackWeights(PackedFormat::kF32, o.source(), nullptr).value()};
  const std::vector<float> x = RandomActivations(m * cols, 55);
  std::vector<std::vector<float>> y;
  std::vector<GemmOutput> outputs;
  for (const PackedWeights& w : weights) y.emplace_back(m * w.rows());
  for (int i = 0; i < 4; ++i)
    outputs.push_back({.weights = &weights[i], .y = y[i].data(), .y_stride = weights[i].rows()});
  AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(m, cols)).value();
  ASSERT_TRUE(
      Gemm({.x = x.data(), .x_stride = cols, .m = m, .outputs = outputs, .scratch = scratch.bytes()}, *cpu.stream)
          .ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(y[i], RunGemm(cpu, weights[i], x, m)) << i;
}

TEST_P(GemmIsa, TakesManyRowsThroughSeveralRowBlocks) {
  Cpu cpu(GetParam(), 2);
  const int64_t rows = 50, cols = 64, m = 700;
  const RawMatrix matrix(RowFormat::kQ8_0, rows, cols, 61);
  const PackedWeights w = PackWeights(PackedFormat::kU8Symmetric, matrix.source(), nullptr).value();
  const std::vector<float> x = RandomActivations(m * cols, 62);
  const std::vector<float> y = RunGemm(cpu, w, x, m);
  const std::vector<float> seen = reference::AsActivations(w.format(), kB8, x, m, cols);
  EXPECT_LE(RelativeRms(y.data(), rows, reference::Gemm(seen, reference::DequantizeAll(matrix.source()), m, rows, cols),
                        m, rows),
            kF32Sum);
}

// Numbers whose first piece alone would be wrong by up to an eighth of a percent, and such that are not representable
// in two.
TEST_P(GemmIsa, WeightsInBF16MeetAllBitsOfX) {
  Cpu cpu(GetParam(), 1);
  constexpr int64_t kCols = 33;
  const std::vector<uint16_t> ones(kCols, ToBF16(1.0f).bits);
  const auto row_at = [&](int64_t) { return reinterpret_cast<const std::byte*>(ones.data()); };
  const PackedWeights w = PackWeights(PackedFormat::kBF16, {RowFormat::kBF16, 1, kCols, row_at}, nullptr).value();
  for (const float value : {1.0f + 0x1p-23f, 0x1.fffffep+100f, -0x1.012345p-20f, 0x1.abcdefp-3f, 3.0e38f}) {
    std::vector<float> x(kCols, 0.0f);
    for (const int64_t at : {0, 31, 32}) {
      x.assign(kCols, 0.0f);
      x[at] = value;
      EXPECT_THAT(RunGemm(cpu, w, x, 1, kB16), testing::ElementsAre(value)) << at;
    }
  }
}

TEST_P(GemmIsa, CountsAGroupOfTinyActivationsAsZero) {
  Cpu cpu(GetParam(), 1);
  const RawMatrix matrix(RowFormat::kQ4_0, 16, 64, 71);
  const PackedWeights w = PackWeights(PackedFormat::kU4Symmetric, matrix.source(), nullptr).value();
  for (const ActivationBits bits : {kB8, kB16}) {
    EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(64, 1e-39f), 1, bits), testing::Each(0.0f));
    EXPECT_THAT(RunGemm(cpu, w, std::vector<float>(64, 0.0f), 1, bits), testing::Each(0.0f));
  }
}

// Matrices wider than what goes through AMX together, rows that fill panels and not, more than a block of rows.
TEST(Gemm, QuantisedProductsHaveTheSameBitsWithAvx512AndAmx) {
  if (DetectIsa().value() < Isa::kAmx) GTEST_SKIP() << "this CPU lacks " << Name(Isa::kAmx);
  Cpu avx512(Isa::kAvx512, 2), amx(Isa::kAmx, 2);
  const int64_t rows = 50, cols = 2560;
  for (const Case& each : kCases) {
    if (!IsQuantized(each.to)) continue;
    const RawMatrix matrix(each.from, rows, cols, 91);
    const PackedWeights w = PackWeights(each.to, matrix.source(), nullptr).value();
    for (const int64_t m : {3, 4, 11, 16, 300}) {
      const std::vector<float> x = RandomActivations(m * cols, 92);
      const std::vector<float> a = RunGemm(avx512, w, x, m, each.bits), b = RunGemm(amx, w, x, m, each.bits);
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << Name(each.to) << ", m = " << m;
    }
  }
}

TEST(Gemm, WritesNothingForNoRows) {
  Cpu cpu(kStrongestIsa, 2);
  const RawMatrix matrix(RowFormat::kQ4_0, 16, 64, 1);
  const PackedWeights w = PackWeights(PackedFormat::kU4Symmetric, matrix.source(), nullptr).value();
  EXPECT_TRUE(RunGemm(cpu, w, {}, 0).empty());
}

TEST(Gemm, RefusesWhatDoesNotFitBeforeItWrites) {
  Cpu cpu(kStrongestIsa, 1);
  const RawMatrix narrow(RowFormat::kQ4_0, 16, 64, 1), wide(RowFormat::kQ4_0, 16, 96, 1);
  const PackedWeights a = PackWeights(PackedFormat::kU4Symmetric, narrow.source(), nullptr).value();
  const PackedWeights b = PackWeights(PackedFormat::kU4Symmetric, wide.source(), nullptr).value();
  std::vector<float> x(96), y(16, kSentinel);
  AlignedBuffer scratch = AlignedBuffer::Create(GemmScratchBytes(1, 96)).value();
  const auto run = [&](std::vector<GemmOutput> outputs, int64_t m, int64_t x_stride, size_t scratch_bytes) {
    return std::string(Gemm({.x = x.data(),
                             .x_stride = x_stride,
                             .m = m,
                             .outputs = outputs,
                             .scratch = scratch.bytes().first(scratch_bytes)},
                            *cpu.stream)
                           .message());
  };
  const GemmOutput good{.weights = &a, .y = y.data(), .y_stride = 16};
  const size_t all = scratch.size_bytes();
  EXPECT_EQ(run({good, {.weights = &b, .y = y.data(), .y_stride = 16}}, 1, 96, all),
            "gemm: output 1 has weights of 96 columns, the first has 64");
  EXPECT_EQ(run({good}, 1, 63, all), "gemm: x_stride of 63 for 64 columns");
  EXPECT_EQ(run({{.weights = &a, .y = y.data(), .y_stride = 15}}, 1, 64, all),
            "gemm: output 0 has a y_stride of 15 for 16 columns");
  EXPECT_EQ(run({{.weights = nullptr, .y = y.data(), .y_stride = 16}}, 1, 64, all), "gemm: output 0 has no weights");
  EXPECT_EQ(run({{.weights = &a, .y = nullptr, .y_stride = 16}}, 1, 64, all), "gemm: output 0 has no y");
  EXPECT_EQ(run({good}, -1, 64, all), "gemm: m = -1 is outside 0..1048576");
  EXPECT_THAT(run({good}, 1, 64, 64), testing::HasSubstr("bytes of scratch aligned to 64, got 64"));
  EXPECT_THAT(y, testing::Each(kSentinel));
}

}  // namespace
}  // namespace dovetail::kernels
