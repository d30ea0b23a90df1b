#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/device.h"

namespace dovetail::kernels {

// The inner loops of linear_state.h: up to kLinearTileRows tokens of one block of one head on raw pointers, compiled
// once per ISA with the same bits. Arguments are checked by the caller.
// Threads: reentrant; tables are immutable.

inline constexpr int kLinearTileRows = 16;
inline constexpr int kLinearMaxDim = 256;
inline constexpr int kLinearBlockTokens = 64;
// Rows that decode reads one after the other.
struct LinearFetch {
  const std::byte* const* rows;
  int count;
  int bytes;  // of a row
};

// What decode will read, in its order, through the end of one head and into the next. For each row that is read the
// next one is fetched, and kBetween more where nothing is read for a while.
struct LinearStream {
  static constexpr int kAhead = 24;      // rows that are fetched before the first is read
  static constexpr int kMostAhead = 96;  // of the next head's S, once this head is done
  static constexpr int kBetween = 4;
  static constexpr int kMaxParts = 8;
  LinearFetch parts[kMaxParts];
  int count = 0;
  int part = 0, row = 0;  // where the next one to be fetched is
};

struct LinearTile {
  int key_dim = 0, value_dim = 0;
  bool vector_decay = false;
  bool delta = false;
  bool rank_one = false;
  bool state_bf16 = false;

  int first = 0;  // tokens [first, first + rows) of the block
  int rows = 0;
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  const float* log_decay = nullptr;
  const float* beta = nullptr;
  const float* b = nullptr;
  const float* c = nullptr;
  float* o = nullptr;
  int64_t q_step = 0, k_step = 0, v_step = 0, decay_step = 0, beta_step = 0, b_step = 0, c_step = 0, o_step = 0;

  // Rows of the sections of LinearStateLayout.
  const std::byte* const* state = nullptr;  // at the beginning of the block; null: S = 0
  std::byte* const* keys = nullptr;
  std::byte* const* values = nullptr;
  std::byte* const* decays = nullptr;
  std::byte* const* rank_keys = nullptr;
  std::byte* const* rank_values = nullptr;

  // For decode: what it and the next tile will read. Null: nothing is fetched before.
  LinearStream* stream = nullptr;
};

struct LinearStateKernels {
  // Appends the tile's tokens and computes their o.
  void (*append)(const LinearTile& tile);
  // state_out = S after all 64 tokens of the block; only the sections of the tile are read.
  void (*advance)(const LinearTile& tile, std::byte* const* state_out);
  // out[i] = act(bias[i] + sum_w weights[w * weight_step + i] taps[w][i]), w ascending. bias may be null.
  void (*convolve)(const float* const* taps, const float* weights, int64_t weight_step, int width, const float* bias,
                   bool silu, int64_t n, float* out);
  // out = x * rsqrt(sum(x^2) + eps) * factor.
  void (*l2_norm)(const float* x, float eps, float factor, int n, float* out);
  // out = x / (1 + e^-gate) = x sigmoid(gate); out may be x or gate. gate = x gives silu.
  void (*sigmoid_mul)(const float* gate, const float* x, float* out, int64_t n);
};

const LinearStateKernels& SelectLinearState(Isa isa);
const LinearStateKernels& LinearStateAvx2();
const LinearStateKernels& LinearStateAvx512();

}  // namespace dovetail::kernels
