#pragma once
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/state/state_pack_args.h"

namespace dovetail::kernels::cuda {

// Linear states between their blocks on a GPU (state_args.h) and the wire (proto/state_blocks.h), on the GPU: what
// StateToCpu and StateFromCpu with linear_attention::PackedState do on the host. Decays may differ in the last bit.
//
// Both: a job is one block of one head; jobs of a launch write different memory.
// Errors: kInvalidArgument, before anything runs, for null pointers and blocks in several pieces; kInternal if the
// device is lost.
// Threads: enqueue and return; thread-safe on different streams.
// Memory: allocate nothing.

// For blocks of such a launch (StateLaunchFor, with its convolution set). The jobs are the caller's to fill in.
StatePackLaunch StatePackFor(const StateLaunch& of);

absl::Status PackStates(CudaStream& stream, const StatePackLaunch& args);
// What the wire does not have of a block stays as it was; rows are padded with zeros.
absl::Status UnpackStates(CudaStream& stream, const StatePackLaunch& args);

}  // namespace dovetail::kernels::cuda
