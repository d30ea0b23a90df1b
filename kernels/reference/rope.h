#pragma once
#include <span>
#include <vector>

namespace dovetail::kernels::reference {

// rope.h on one head, in double precision: the angle is the f32 product position * inv_freq, as
// models are trained with. Rotates the first 2 * inv_freq.size() dimensions.
// Threads: pure.
std::vector<double> Rope(std::span<const float> head, int position, std::span<const float> inv_freq, double multiplier);

}  // namespace dovetail::kernels::reference
