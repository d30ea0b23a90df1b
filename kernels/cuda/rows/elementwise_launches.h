#pragma once
#include <cstddef>

#include "kernels/cuda/rows/activation_args.h"
#include "kernels/cuda/rows/elementwise_args.h"
#include "kernels/cuda/rows/norm_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (rows/row_ops.h).
// Threads: any host thread, one at a time per stream.
int LaunchRmsNorm(const RmsNormLaunch* launch, void* stream);
int LaunchGatedActivation(const ActivationLaunch* launch, void* stream);
int LaunchMlpActivation(const MlpActivationLaunch* launch, void* stream);
int LaunchEmbed(const EmbedLaunch* launch, void* stream);
int LaunchCombine(const CombineLaunch* launch, void* stream);
int LaunchRandom(const RandomLaunch* launch, void* stream);
int LaunchReadAll(const void* memory, size_t bytes, void* result, void* stream);

}  // namespace dovetail::kernels::cuda
