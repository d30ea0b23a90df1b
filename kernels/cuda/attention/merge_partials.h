#pragma once
#include "kernels/cuda/attention/merge_args.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Joins partial attention on a GPU (kernels/merge_partials.h is the oracle); MergeLaunch says over which shapes.
//
// All: check, enqueue one kernel, return.
// Errors: kInvalidArgument, before anything runs, for null pointers, odd sizes or strides (elements are moved in pairs)
// and sizes outside the limits; kInternal if the device is lost.
// Threads: thread-safe on different streams.
// Memory: allocate nothing, and may be captured.
// Numbers: activations are in a wire type, sums in f32; a row's bits depend on that row only.
absl::Status MergePartials(CudaStream& stream, const MergeLaunch& args);

}  // namespace dovetail::kernels::cuda
