#include "examples/spatio_temporal/weights.h"

#include <cmath>

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

absl::StatusOr<kernels::PackedWeights> Matrix(uint64_t key, int64_t rows, int64_t cols, kernels::ThreadPool* pool) {
  std::vector<BF16> values(rows * cols);
  const float scale = 1 / std::sqrt(static_cast<float>(cols));
  for (int64_t i = 0; i < rows * cols; ++i) values[i] = ToBF16(Uniform(key, i) * scale);
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

absl::StatusOr<BlockWeights> RandomBlock(const Config& config, uint64_t key, kernels::ThreadPool* pool) {
  const int64_t c = config.channels, mlp = config.mlp();
  BlockWeights block;
  block.attention_norm = Norm(Mix(key), c);
  block.mlp_norm = Norm(Mix(key + 1), c);
  DT_ASSIGN_OR_RETURN(block.query, Matrix(Mix(key + 2), c, c, pool));
  DT_ASSIGN_OR_RETURN(block.key, Matrix(Mix(key + 3), c, c, pool));
  DT_ASSIGN_OR_RETURN(block.value, Matrix(Mix(key + 4), c, c, pool));
  DT_ASSIGN_OR_RETURN(block.out, Matrix(Mix(key + 5), c, c, pool));
  DT_ASSIGN_OR_RETURN(block.gate, Matrix(Mix(key + 6), mlp, c, pool));
  DT_ASSIGN_OR_RETURN(block.up, Matrix(Mix(key + 7), mlp, c, pool));
  DT_ASSIGN_OR_RETURN(block.down, Matrix(Mix(key + 8), c, mlp, pool));
  return block;
}

}  // namespace

absl::StatusOr<Weights> Weights::Random(const Config& config, kernels::ThreadPool* pool) {
  Weights weights;
  if (config.exchange_only) {
    weights.spatial.resize(config.pairs);
    weights.temporal.resize(config.pairs);
    return weights;
  }
  for (int pair = 0; pair < config.pairs; ++pair) {
    const uint64_t key = Mix(config.seed) + 64 * static_cast<uint64_t>(pair);
    DT_ASSIGN_OR_RETURN(BlockWeights spatial, RandomBlock(config, key, pool));
    DT_ASSIGN_OR_RETURN(BlockWeights temporal, RandomBlock(config, key + 32, pool));
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
