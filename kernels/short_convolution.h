#pragma once
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// The causal depthwise convolution before a linear state (width 2..8, usually 4), one channel at a time:
//   y_t = act(bias + sum_{w < width} weight[w] x_{t - (width - 1) + w})
// x before the sequence's first token is 0. What a sequence must remember of the past are its last width - 1 rows of x.
inline constexpr int kMaxConvWidth = 8;

struct ShortConvolutionArgs {
  const float* x = nullptr;        // [rows][channels], row step x_step
  const float* history = nullptr;  // [width - 1][channels] dense: the rows before, zeros where there are none
  const float* weights = nullptr;  // [width][channels]: tap by tap, the last one meets the row itself
  int64_t weight_step = 0;         // floats from tap to tap; 0: dense
  const float* bias = nullptr;     // [channels] or null
  bool silu = true;
  int width = 0;
  int64_t rows = 0;
  int64_t channels = 0;
  int64_t x_step = 0;    // 0: dense
  int64_t out_step = 0;  // 0: dense
  float* out = nullptr;  // not x
};

// Numbers: a channel's bits depend on its own inputs only, on both ISAs alike.
// Errors:  kInvalidArgument for null pointers and sizes outside the above.
// Threads: runs on the caller and the pool, returns when done; reentrant.
// Memory:  allocates nothing.
absl::Status ShortConvolution(const OpContext& context, const ShortConvolutionArgs& args);

// out = x * rsqrt(sum(x^2) + eps) * factor over each of `vectors` neighbouring vectors of a row; out may be x.
// Errors and threads: as above.
struct L2NormArgs {
  const float* x = nullptr;
  float* out = nullptr;
  int64_t rows = 0;
  int vectors = 1;
  int size = 0;
  float eps = 1e-6f;
  float factor = 1;
  int64_t x_step = 0;  // 0: dense
  int64_t out_step = 0;
};
absl::Status L2Norm(const OpContext& context, const L2NormArgs& args);

}  // namespace dovetail::kernels
