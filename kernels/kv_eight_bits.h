#pragma once
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace dovetail::kernels {

// K and V in 8 bits, a row (one token of one KV head) at a time: its bytes depend on nothing but the row.
//
// Storing what was read gives the same bytes and the same scale, also where it was rounded to bfloat16 in between
// (tests/kernels/kv_eight_bits_test.cc tries every scale and every code). For int8 this is what the scales are chosen
// for: an octave has four of them, 1, 1.25, 1.5 and 1.75 times a power of two.
// Threads: pure.
// Memory: allocate nothing.

// The code of the E4M3 number next to x, ties to even: 448 where |x| is larger, NaN (0x7f) for NaN.
uint8_t ToE4M3(float x);
float FromE4M3(uint8_t code);

// The smallest scale s with max |x| / s <= 127 7/16, and at least 2^-82; NaN where one of x is not finite.
float Int8ScaleOf(std::span<const BF16> x);
// out[i] = x[i] / scale, rounded to nearest, ties to even; 0 where the scale is NaN.
void ToInt8(std::span<const BF16> x, float scale, int8_t* out);
// code * scale, rounded to bfloat16, cut off at the largest finite one.
BF16 FromInt8(int8_t code, float scale);

}  // namespace dovetail::kernels
