#pragma once
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/state/layer_args.h"

namespace dovetail::kernels::cuda {

// The small ops before and after a linear state, on a GPU; layer_args.h says what each computes over which shapes.
//
// All: check, enqueue one kernel, return.
// Errors: kInvalidArgument, before anything runs, for null pointers, odd sizes or strides (elements are moved in pairs)
// and sizes outside the limits; kInternal if the device is lost.
// Threads: thread-safe on different streams.
// Memory: allocate nothing, and may be captured.
// Numbers: activations are in a wire type, sums in f32; a row's bits depend on that row only.
// Oracles: state_gates.h, short_convolution.h and activation.h on the CPU; budgets in tests/kernels_cuda/.

absl::Status StateInputs(CudaStream& stream, const StateInputsLaunch& args);
absl::Status StateGates(CudaStream& stream, const StateGatesLaunch& args);
absl::Status OutputGate(CudaStream& stream, const OutputGateLaunch& args);

}  // namespace dovetail::kernels::cuda
