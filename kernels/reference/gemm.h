#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/packed_weights.h"

namespace dovetail::kernels::reference {

// W as the file means it: every row dequantised, [rows, cols].
// Threads: pure.
std::vector<float> DequantizeAll(const RowSource& source);

// y = x W^T in double precision, plain loops. x [m, cols], w [rows, cols], result [m, rows].
std::vector<double> Gemm(std::span<const float> x, std::span<const float> w, int64_t m, int64_t rows, int64_t cols);

// x as the kernels of that packed format see it: as it is (kF32, and kBF16 with 16 bits), rounded to
// bf16 (kBF16 with 8), or quantised to 8 or 16 bits per row and group of 32 and back. Against
// Gemm() of this, only the rounding of f32 sums is left, so that the budget of a test can be a
// thousand times tighter than the format's own error.
std::vector<float> AsActivations(PackedFormat format, ActivationBits bits, std::span<const float> x, int64_t m,
                                 int64_t cols);

}  // namespace dovetail::kernels::reference
