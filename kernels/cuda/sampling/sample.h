#pragma once
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/sampling/sampling_args.h"

namespace dovetail::kernels::cuda {

// Chooses one token a row on a GPU (sampling.h). params, seen, biases, allowed and out lie on the device; their ids
// must lie in the vocabulary. A draw is that of the CPU unless two scores lie closer than f32 rounds z.
// Errors: kInvalidArgument for null pointers and sizes outside SampleLaunch's, before anything runs; kInternal if the
// device is lost.
// Threads: thread-safe on different streams.
absl::Status Sample(CudaStream& stream, const SampleLaunch& args);

}  // namespace dovetail::kernels::cuda
