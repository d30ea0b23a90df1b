#pragma once
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of the norm: device pointers, a plain struct. Activations are in a wire type; sums are in f32.
// Threads: plain values.

struct RmsNormLaunch {
  void* x = nullptr;                                    // [rows][size]; gets x + residual if there is one
  const void* residual = nullptr;                       // or null; the sum of `parts` of them, part_step elements apart
  const float* weight = nullptr;                        // [size]
  void* out = nullptr;                                  // may be x
  int64_t x_step = 0, residual_step = 0, out_step = 0;  // elements
  WireType x_type = WireType::kBF16;                    // of x and residual
  WireType out_type = WireType::kBF16;
  float eps = 0;
  int32_t rows = 0, size = 0;
  int32_t parts = 1;
  int64_t part_step = 0;
};

}  // namespace dovetail::kernels::cuda
