#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// n elements of `dtype` <-> float. Bit for bit what base/dtype.h does one by one: rounds to nearest even, overflow
// gives infinity, NaN stays NaN. Runs of rows [rows][size] with steps in elements (0: dense). Pointers must not overlap
// unless equal and dtype is f32.
// Errors: none; nothing is checked.
// Threads: runs on the caller and the pool, returns when done; reentrant. Allocates nothing.
struct RowShape {
  int64_t rows = 1;
  int64_t size = 0;
  int64_t in_step = 0;
  int64_t out_step = 0;
};
void ToFloat(const OpContext& context, DType dtype, const void* in, float* out, const RowShape& shape);
void FromFloat(const OpContext& context, DType dtype, const float* in, void* out, const RowShape& shape);

}  // namespace dovetail::kernels
