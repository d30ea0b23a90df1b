#pragma once
#include "kernels/cuda/attention/pack_heads_args.h"
#include "kernels/cuda/rows/activation_args.h"
#include "kernels/cuda/rows/append_args.h"
#include "kernels/cuda/rows/elementwise_args.h"
#include "kernels/cuda/rows/norm_args.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// The small ops on rows of activations, on a GPU. The structs of their arguments say what each computes and which
// shapes its device pointers have.
//
// All: check, enqueue one kernel, return.
// Errors: kInvalidArgument, before anything runs, for null pointers, odd sizes or strides (elements are moved in pairs)
// and sizes outside the limits; kInternal if the device is lost.
// Threads: thread-safe on different streams.
// Memory: allocate nothing, and may be captured.
// Numbers: activations are in a wire type, sums in f32; a row's bits depend on that row only.
// Oracles: kernels/reference/, activation.h; budgets in tests/kernels_cuda/.

// x += residual (rounded to x's type); out = x * rsqrt(mean(x^2) + eps) * weight.
absl::Status RmsNorm(CudaStream& stream, const RmsNormLaunch& args);
// out = activation(gate) * up.
absl::Status GatedActivation(CudaStream& stream, const ActivationLaunch& args);
absl::Status MlpActivation(CudaStream& stream, const MlpActivationLaunch& args);
// out[i] = table[ids[i]] * factor. The ids, and the tokens that they stand for, must lie in the table.
absl::Status Embed(CudaStream& stream, const EmbedLaunch& args);
absl::Status RopeTable(CudaStream& stream, const RopeTableLaunch& args);
// Per-head norms, rope, the append of k and v (or their rows as they are) and the rotated q, in one pass over q, k, v.
absl::Status KvAppend(CudaStream& stream, const KvAppendLaunch& args);
// The same for whole sequences whose blocks lie in order; elements as they are. All sizes are multiples of eight
// elements, and pointers of 16 bytes; at most 2^35 bytes are written.
absl::Status PackHeads(CudaStream& stream, const PackHeadsLaunch& args);
absl::Status JoinKeys(CudaStream& stream, const JoinKeysLaunch& args);
// The products' small companions: sums and scaled copies, and conversions between wire types. Counts are even.
absl::Status Combine(CudaStream& stream, const CombineLaunch& args);
absl::Status FillRandom(CudaStream& stream, const RandomLaunch& args);

}  // namespace dovetail::kernels::cuda
