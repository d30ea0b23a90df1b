#pragma once
#include "kernels/cuda/products/quant_args.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Ops on weights that stay in 4 or 8 bits (quant_args.h). All: check, enqueue, return. kInvalidArgument, before
// anything runs, for null or misaligned pointers, and sizes outside the limits; kInternal if the device is lost.
// Allocate nothing.
// Oracles: kernels/reference/; budgets in tests/kernels_cuda/cuda_quant_test.cc.
// Threads: thread-safe on different streams.

inline constexpr int32_t kMostQuantRows = 1024;

// kUnimplemented: `cols` are too many for the shared memory of a product that does not add to f32.
absl::Status MultiplyQuant(CudaStream& stream, const QuantGemmLaunch& args);
absl::Status UnpackQuant(CudaStream& stream, const QuantUnpackLaunch& args);
absl::Status EmbedQuant(CudaStream& stream, const QuantEmbedLaunch& args);

}  // namespace dovetail::kernels::cuda
