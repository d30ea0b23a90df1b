#pragma once
#include <cstddef>

#include "kernels/cuda/row_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. Arguments are checked by the callers (cuda_ops.h).
int LaunchMerge(const MergeLaunch* launch, void* stream);
int LaunchJoinPrompts(const JoinPromptsLaunch* launch, void* stream);
int LaunchKvAppend(const KvAppendLaunch* launch, void* stream);
int LaunchRopeTable(const RopeTableLaunch* launch, void* stream);
int LaunchRmsNorm(const RmsNormLaunch* launch, void* stream);
int LaunchGatedActivation(const ActivationLaunch* launch, void* stream);
int LaunchEmbed(const EmbedLaunch* launch, void* stream);
int LaunchCombine(const CombineLaunch* launch, void* stream);
int LaunchRandom(const RandomLaunch* launch, void* stream);
int LaunchSample(const SampleLaunch* launch, void* stream);
int LaunchReadAll(const void* memory, size_t bytes, void* result, void* stream);

}  // namespace dovetail::kernels::cuda
