#include "tests/kernels/gemm_matrices.h"

#include <cmath>
#include <cstring>
#include <random>

#include "base/dtype.h"

namespace dovetail::kernels::test {
namespace {

using Random = std::mt19937;

uint16_t Half(Random& random, float low, float high) {
  return ToF16(std::uniform_real_distribution<float>(low, high)(random)).bits;
}

template <typename Block>
void RandomizeScales(Block& block, Random& random) {
  if constexpr (requires { block.e; }) {
    block.e = static_cast<uint8_t>(128 - 9 + random() % 3);
  } else {
    block.d = Half(random, 0.002f, 0.01f);
    if constexpr (requires { block.m; }) block.m = Half(random, -0.08f, 0.02f);
    if constexpr (requires { block.dmin; }) block.dmin = Half(random, 0.001f, 0.006f);
    if (random() % 4 == 0) block.d ^= 0x8000;  // scales may be negative
  }
}

template <typename Block>
void FillBlocks(std::vector<std::byte>& bytes, Random& random) {
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  for (size_t at = 0; at < bytes.size(); at += sizeof(Block)) {
    Block block;
    std::memcpy(&block, &bytes[at], sizeof(Block));
    RandomizeScales(block, random);
    std::memcpy(&bytes[at], &block, sizeof(Block));
  }
}

template <typename T, typename Convert>
void FillFloats(std::vector<std::byte>& bytes, Random& random, Convert convert) {
  std::normal_distribution<float> normal(0, 0.05f);
  for (size_t at = 0; at < bytes.size(); at += sizeof(T)) {
    const T value = convert(normal(random));
    std::memcpy(&bytes[at], &value, sizeof(T));
  }
}

}  // namespace

RawMatrix::RawMatrix(RowFormat format, int64_t rows, int64_t cols, uint32_t seed)
    : format_(format),
      rows_(rows),
      cols_(cols),
      bytes_(rows * RowBytes(format, cols)),
      at_{bytes_.data(), RowBytes(format, cols)} {
  Random random(seed);
  switch (format) {
    case RowFormat::kF32: FillFloats<float>(bytes_, random, [](float x) { return x; }); break;
    case RowFormat::kF16: FillFloats<F16>(bytes_, random, [](float x) { return ToF16(x); }); break;
    case RowFormat::kBF16: FillFloats<BF16>(bytes_, random, [](float x) { return ToBF16(x); }); break;
    case RowFormat::kQ4_0: FillBlocks<BlockQ4_0>(bytes_, random); break;
    case RowFormat::kQ4_1: FillBlocks<BlockQ4_1>(bytes_, random); break;
    case RowFormat::kQ5_0: FillBlocks<BlockQ5_0>(bytes_, random); break;
    case RowFormat::kQ5_1: FillBlocks<BlockQ5_1>(bytes_, random); break;
    case RowFormat::kQ8_0: FillBlocks<BlockQ8_0>(bytes_, random); break;
    case RowFormat::kQ4_K: FillBlocks<BlockQ4_K>(bytes_, random); break;
    case RowFormat::kQ5_K: FillBlocks<BlockQ5_K>(bytes_, random); break;
    case RowFormat::kQ6_K: FillBlocks<BlockQ6_K>(bytes_, random); break;
    case RowFormat::kMXFP4: FillBlocks<BlockMXFP4>(bytes_, random); break;
  }
}

std::vector<float> RandomActivations(int64_t count, uint32_t seed) {
  Random random(seed);
  std::normal_distribution<float> normal(0.1f, 1.0f);
  std::vector<float> x(count);
  for (float& v : x) v = normal(random) * (random() % 97 == 0 ? 20.0f : 1.0f);
  return x;
}

double RelativeRms(const float* y, int64_t y_stride, const std::vector<double>& expected, int64_t m, int64_t n) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double e = expected[i * n + j], d = y[i * y_stride + j] - e;
      error += d * d;
      size += e * e;
    }
  }
  return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}

}  // namespace dovetail::kernels::test
