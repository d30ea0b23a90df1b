#pragma once
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// Rotary position embedding on half-split pairs (i, i + rotary/2) of the first `rotary` dimensions of each head; the
// rest passes through. Models whose weights pair neighbours are permuted when they are loaded.

// cos and sin of every row, once per step and per set of frequencies, for all layers and heads that share them:
//   angle = position * inv_freq[i] in f32
//   cos_out, sin_out [rows][inv_freq.size()] = f32(cos, sin in double of that angle) * multiplier
// so large angles lose nothing beyond the f32 product itself.
// Threads: runs on the caller and the pool, returns when done.
void ComputeRopeTable(const OpContext& context, std::span<const int32_t> positions, std::span<const float> inv_freq,
                      float multiplier, float* cos_out, float* sin_out);

// Rotates and rounds to the wire type: out = round(rope(x)). Without cos and sin (layers that know no positions) it
// only rounds.
struct RopeArgs {
  const float* x = nullptr;  // [rows][heads][head_dim]
  int64_t x_step = 0;        // floats from row to row; 0: dense
  int64_t rows = 0;
  int heads = 0;
  int head_dim = 0;            // 2..256
  int rotary = 0;              // even, 0..head_dim
  const float* cos = nullptr;  // [rows][rotary / 2], or both null
  const float* sin = nullptr;
  DType dtype = DType::kF32;  // of out
  void* out = nullptr;        // [rows][heads][head_dim]; may be x if f32 with the same step
  int64_t out_step = 0;       // elements; 0: dense
};

// Numbers: a head's bits depend on that head and its angles only.
// Errors:  kInvalidArgument for null pointers and sizes outside the above.
// Threads: runs on the caller and the pool, returns when done.
// Memory:  allocates nothing.
// Cost:    4 bytes read and SizeOf(dtype) written a float, 3 FLOP a rotated one.
// Oracle:  reference/rope.h.
// Source:  Su et al. 2021, in the half-split form of GPT-NeoX.
absl::Status Rope(const OpContext& context, const RopeArgs& args);

}  // namespace dovetail::kernels
