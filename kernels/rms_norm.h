#pragma once
#include <cstdint>

#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// y = x * rsqrt(mean(x^2) + eps) * weight over each vector of `size` floats, f32 throughout; x += residual first where
// one is given. A row is `vectors` such vectors side by side: 1 for a layer norm, the number of heads for the q and k
// norms of Qwen3 and Gemma.
struct RmsNormArgs {
  float* x = nullptr;               // [rows][vectors * size]; written only if there is a residual
  const float* residual = nullptr;  // same shape, or null
  const float* weight = nullptr;    // [size], shared by all vectors
  bool weight_each = false;         // then [vectors][size]: every vector has its own
  float eps = 0;
  int64_t rows = 0;
  int vectors = 1;
  int size = 0;          // 1 .. 2^20
  float* out = nullptr;  // [rows][vectors * size]; may be x
  int64_t x_step = 0;    // floats from row to row; 0: dense
  int64_t residual_step = 0;
  int64_t out_step = 0;
};

// Numbers: a row's bits depend on that row only, and not on the ISA.
// Errors:  kInvalidArgument for null pointers and sizes outside the above.
// Threads: runs on the caller and the pool, returns when done.
// Memory:  allocates nothing.
// Cost:    8 bytes a float (16 with a residual), 4 FLOP a float.
// Oracle:  reference/rms_norm.h.
// Source:  Zhang & Sennrich 2019.
absl::Status RmsNorm(const OpContext& context, const RmsNormArgs& args);

}  // namespace dovetail::kernels
