#pragma once

// GPUs raise 2 to a power, so exponents are kept in base 2: exp(x) is Exp2(x kLog2E), and ln(x) is log2(x) kLn2.
// Threads: constants.

namespace dovetail::kernels::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace dovetail::kernels::cuda
