#pragma once
#include <span>
#include <vector>

namespace dovetail::kernels::reference {

// rms_norm.h on one vector, in double precision. residual may be empty.
// Threads: pure.
std::vector<double> RmsNorm(std::span<const float> x, std::span<const float> residual, std::span<const float> weight,
                            double eps);

}  // namespace dovetail::kernels::reference
