#pragma once
#include <cstdint>

#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// The small elementwise steps around a linear state.
// Numbers: the same bits on every ISA.
// Errors: kInvalidArgument for null pointers and negative sizes.
// Threads: run on the caller and the pool, return when done; reentrant. Allocate nothing.

// out = x sigmoid(gate), [rows][size] f32; steps in floats, 0: dense. `gate` may be x: then it is silu. out may be
// either.
struct SigmoidGateArgs {
  const float* x = nullptr;
  const float* gate = nullptr;
  float* out = nullptr;
  int64_t rows = 0;
  int64_t size = 0;
  int64_t x_step = 0;
  int64_t gate_step = 0;
  int64_t out_step = 0;
};
absl::Status SigmoidGate(const OpContext& context, const SigmoidGateArgs& args);

// What a step size does to a state: t = clamp(softplus(x + bias), low, high), log decay = factor t, and the step itself
// is the rate of families that ask for it. Row r, head h: decays out[r][h * stride + 0 .. width) from x
// [r][h * width + ..], rate (where wanted) at out[r][h * stride + width].
struct StepDecayArgs {
  const float* x = nullptr;       // [rows][heads * width]
  const float* bias = nullptr;    // [heads * width]
  const float* factor = nullptr;  // [heads * width], negative
  float low = 0, high = 3.4e38f;  // of t
  bool rate = false;              // needs width == 1
  int64_t rows = 0;
  int heads = 0;
  int width = 1;         // decays of a head
  int stride = 0;        // floats of a head in out
  float* out = nullptr;  // [rows][heads * stride]
};
absl::Status StepDecay(const OpContext& context, const StepDecayArgs& args);

// out[r][h * stride + at] = scale sigmoid(x[r][h]).
struct SigmoidRateArgs {
  const float* x = nullptr;  // [rows][heads]
  float scale = 1;
  int64_t rows = 0;
  int heads = 0;
  int stride = 0;
  int at = 0;
  float* out = nullptr;
};
absl::Status SigmoidRate(const OpContext& context, const SigmoidRateArgs& args);

}  // namespace dovetail::kernels
