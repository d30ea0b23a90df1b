#pragma once
#include "kernels/cuda/hybrid_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t.
// Any host thread, one at a time per stream. Arguments are checked by the callers (cuda_hybrid_ops.h).
int LaunchStateInputs(const StateInputsLaunch* launch, void* stream);
int LaunchStateGates(const StateGatesLaunch* launch, void* stream);
int LaunchOutputGate(const OutputGateLaunch* launch, void* stream);
int LaunchJoinKeys(const JoinKeysLaunch* launch, void* stream);
int LaunchMlpActivation(const MlpActivationLaunch* launch, void* stream);
int LaunchGatedAdd(const GatedAddLaunch* launch, void* stream);
int LaunchRoute(const RouteLaunch* launch, void* stream);
int LaunchPlace(const PlaceLaunch* launch, void* stream);
int LaunchExpertGemm(const ExpertGemmLaunch* launch, void* stream);
int LaunchExpertSum(const ExpertSumLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
