#pragma once
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "kernels/packed_weights.h"

namespace dovetail::spatio_temporal {

// Of one block, spatial or temporal; in bf16, [out][in].
// Threads: immutable once made; ranks that are threads share them.
struct BlockWeights {
  std::vector<float> attention_norm, mlp_norm;    // [C]
  kernels::PackedWeights query, key, value, out;  // [C][C]
  kernels::PackedWeights gate, up;                // [mlp][C]
  kernels::PackedWeights down;                    // [C][mlp]
};

// The same as plain numbers, row by row, for devices that pack them otherwise.
struct BlockValues {
  std::vector<float> attention_norm, mlp_norm;
  std::vector<BF16> query, key, value, out;
  std::vector<BF16> gate, up;
  std::vector<BF16> down;
};
enum class BlockKind { kSpatial, kTemporal };
// Equal for equal configs, wherever it is called.
BlockValues RandomBlock(const Config& config, int pair, BlockKind kind);

struct Weights {
  std::vector<BlockWeights> spatial, temporal;  // [pairs]
  // Equal for equal configs, on every rank; empty ones if config.exchange_only. kResourceExhausted: no memory.
  static absl::StatusOr<Weights> Random(const Config& config, kernels::ThreadPool* pool);
};

// Row (t, s) of the hidden tensor that goes in, [C].
void RandomRow(const Config& config, int64_t t, int64_t s, BF16* row);

}  // namespace dovetail::spatio_temporal
