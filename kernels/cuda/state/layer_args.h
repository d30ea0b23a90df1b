#pragma once
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of the small kernels before and after a linear state: device pointers, plain structs. Matrices are row by
// row; steps are in elements.
// Threads: plain values.

// q, k and v of one product go to tensors of their own: silu of each, or v times another product, or as they are.
struct StateInputsLaunch {
  const void* qkv = nullptr;                      // [rows][q_width + k_width + v_width]
  const void* v_factor = nullptr;                 // [rows][v_width] or null
  void *q = nullptr, *k = nullptr, *v = nullptr;  // dense
  WireType type = WireType::kBF16;
  int32_t silu = 0;
  int32_t rows = 0;
  int64_t q_width = 0, k_width = 0, v_width = 0;
};

// What a token brings to its state, [rows][heads][stride] f32 (state_gates.h): logarithms of decays from step sizes,
// log = factor clamp(softplus(scale x + bias), low, high), at 0 .. width; behind them the rate: the step size itself,
// or rate_scale sigmoid(rate).
struct StateGatesLaunch {
  const float* x = nullptr;       // [rows][heads * width]
  const float* bias = nullptr;    // [heads * width]
  const float* factor = nullptr;  // [heads * width]
  const float* rate = nullptr;    // [rows][heads] or null
  float* out = nullptr;
  float scale = 1, low = 0, high = 3e38f, rate_scale = 1;
  int32_t step_is_rate = 0;
  int32_t rows = 0, heads = 0, width = 1, stride = 0;
};

enum class GateKind : int32_t { kSigmoid = 0, kSilu = 1, kPlain = 2, kNone = 3 };

// out = norm(x) * act(scale gate), or norm(x * act(scale gate)); the norm over vectors of `size`, or none.
struct OutputGateLaunch {
  const void* x = nullptr;        // [rows][width]
  const void* gate = nullptr;     // [rows][width] or null
  const float* weight = nullptr;  // or null: no norm
  void* out = nullptr;            // may be x
  WireType type = WireType::kBF16;
  GateKind kind = GateKind::kNone;
  float scale = 1, eps = 0;
  int32_t gate_first = 0;
  int32_t weight_each = 0;  // the weight is as wide as a row; else `size`, for every vector
  int32_t rows = 0, width = 0, size = 0;
};

}  // namespace dovetail::kernels::cuda
