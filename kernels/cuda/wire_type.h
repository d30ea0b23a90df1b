#pragma once
#include <cstdint>

namespace dovetail::kernels::cuda {

// The type of activations that cross the seam between the workers, as base/dtype.h numbers them.
// Threads: plain values.
enum class WireType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

}  // namespace dovetail::kernels::cuda
