#pragma once
#include <cstdint>

#include "base/status.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

enum class Activation : uint8_t {
  kSilu,           // g / (1 + e^-g)
  kGeluTanh,       // g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))), "gelu_pytorch_tanh"
  kRelu,           // max(g, 0); with gate and up the same: relu(x)^2
  kIdentity,       // g
  kClampedSwiglu,  // GPT-OSS: with g at most 7 and up in [-7, 7], g / (1 + e^-1.702g) * (up + 1)
};

// out = activation(gate) * up (kClampedSwiglu: up + 1), f32 [rows][size] each.
struct GatedActivationArgs {
  Activation activation = Activation::kSilu;
  const float* gate = nullptr;
  const float* up = nullptr;
  float* out = nullptr;  // may be gate or up
  int64_t rows = 0;
  int64_t size = 0;
  int64_t gate_step = 0;  // floats from row to row; 0: dense
  int64_t up_step = 0;
  int64_t out_step = 0;
};

// Of all functions here:
// Numbers: each element depends on its own inputs only, on both ISAs alike.
// Errors: kInvalidArgument for null pointers and negative sizes.
// Threads: run on the caller and the pool, return when done; reentrant. Allocate nothing.
// Oracle: reference/activation.h.
absl::Status GatedActivation(const OpContext& context, const GatedActivationArgs& args);

// out[i] = a[i] + b[i], out may be a or b.
absl::Status Add(const OpContext& context, const float* a, const float* b, float* out, int64_t n);

// out[i] = a[i] * factor, out may be a.
absl::Status Scale(const OpContext& context, const float* a, float factor, float* out, int64_t n);

}  // namespace dovetail::kernels
