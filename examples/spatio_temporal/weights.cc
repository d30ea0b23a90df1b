#include "examples/spatio_temporal/weights.h"

#include <cmath>
#include <utility>

namespace dovetail::spatio_temporal {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): a number for each place, the same for every caller and order of calls.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Uniform with variance 1.
float Uniform(uint64_t key, uint64_t place) {
  constexpr float kRange = 2 * 1.7320508f;
  return (static_cast<float>(Mix(key ^ Mix(place)) >> 40) * 0x1p-24f - 0.5f) * kRange;
}

std::vector<BF16> Matrix(uint64_t key, int64_t rows, int64_t cols) {
  std::vector<BF16> values(rows * cols);
  const float scale = 1 / std::sqrt(static_cast<float>(cols));
  for (int64_t i = 0; i < rows * cols; ++i) values[i] = ToBF16(Uniform(key, i) * scale);
  return values;
}

absl::StatusOr<kernels::PackedWeights> Packed(const std::vector<BF16>& values, int64_t cols,
                                              kernels::ThreadPool* pool) {
  const auto rows = static_cast<int64_t>(values.size()) / cols;
  return kernels::PackWeights(
      kernels::PackedFormat::kBF16,
      {kernels::RowFormat::kBF16, rows, cols,
       [&](int64_t row) { return reinterpret_cast<const std::byte*>(values.data() + row * cols); }},
      pool);
}

std::vector<float> Norm(uint64_t key, int64_t size) {
  std::vector<float> weight(size);
  for (int64_t i = 0; i < size; ++i) weight[i] = 1 + 0.1f * Uniform(key, i);
  return weight;
}

absl::StatusOr<BlockWeights> PackedBlock(const Config& config, BlockValues values, kernels::ThreadPool* pool) {
  const int64_t c = config.channels, mlp = config.mlp();
  BlockWeights block;
  block.attention_norm = std::move(values.attention_norm);
  block.mlp_norm = std::move(values.mlp_norm);
  DT_ASSIGN_OR_RETURN(block.query, Packed(values.query, c, pool));
  DT_ASSIGN_OR_RETURN(block.key, Packed(values.key, c, pool));
  DT_ASSIGN_OR_RETURN(block.value, Packed(values.value, c, pool));
  DT_ASSIGN_OR_RETURN(block.out, Packed(values.out, c, pool));
  DT_ASSIGN_OR_RETURN(block.gate, Packed(values.gate, c, pool));
  DT_ASSIGN_OR_RETURN(block.up, Packed(values.up, c, pool));
  DT_ASSIGN_OR_RETURN(block.down, Packed(values.down, mlp, pool));
  return block;
}

}  // namespace

BlockValues RandomBlock(const Config& config, int pair, BlockKind kind) {
  const int64_t c = config.channels, mlp = config.mlp();
  const uint64_t key = Mix(config.seed) + 64 * static_cast<uint64_t>(pair) + (kind == BlockKind::kTemporal ? 32 : 0);
  return {.attention_norm = Norm(Mix(key), c),
          .mlp_norm = Norm(Mix(key + 1), c),
          .query = Matrix(Mix(key + 2), c, c),
          .key = Matrix(Mix(key + 3), c, c),
          .value = Matrix(Mix(key + 4), c, c),
          .out = Matrix(Mix(key + 5), c, c),
          .gate = Matrix(Mix(key + 6), mlp, c),
          .up = Matrix(Mix(key + 7), mlp, c),
          .down = Matrix(Mix(key + 8), c, mlp)};
}

absl::StatusOr<Weights> Weights::Random(const Config& config, kernels::ThreadPool* pool) {
  Weights weights;
  if (config.exchange_only) {
    weights.spatial.resize(config.pairs);
    weights.temporal.resize(config.pairs);
    return weights;
  }
  for (int pair = 0; pair < config.pairs; ++pair) {
    DT_ASSIGN_OR_RETURN(BlockWeights spatial,
                        PackedBlock(config, RandomBlock(config, pair, BlockKind::kSpatial), pool));
    DT_ASSIGN_OR_RETURN(BlockWeights temporal,
                        PackedBlock(config, RandomBlock(config, pair, BlockKind::kTemporal), pool));
    weights.spatial.push_back(std::move(spatial));
    weights.temporal.push_back(std::move(temporal));
  }
  return weights;
}

void RandomRow(const Config& config, int64_t t, int64_t s, BF16* row) {
  const uint64_t first = static_cast<uint64_t>((t * config.positions + s) * config.channels);
  for (int64_t c = 0; c < config.channels; ++c) row[c] = ToBF16(Uniform(Mix(~config.seed), first + c));
}

}  // namespace dovetail::spatio_temporal
