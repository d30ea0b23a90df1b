#pragma once
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/hybrid_args.h"

namespace dovetail::kernels::cuda {

// The small ops around linear states and experts on a GPU; hybrid_args.h says what each computes over which shapes.
//
// All: check, enqueue one kernel, return; may be captured; allocate nothing. kInvalidArgument, before anything runs,
// for null pointers and sizes outside the limits; kInternal if the device is lost. Thread-safe on different streams.
// Sums are in f32; a row's bits depend on that row only. What experts read and write is counted on the device:
// nothing comes back to the host between routing and their sum. Oracles: state_gates.h, short_convolution.h, moe.h,
// activation.h on the CPU; budgets in tests/kernels_cuda/.

absl::Status StateInputs(CudaStream& stream, const StateInputsLaunch& args);
absl::Status StateGates(CudaStream& stream, const StateGatesLaunch& args);
absl::Status OutputGate(CudaStream& stream, const OutputGateLaunch& args);
absl::Status JoinKeys(CudaStream& stream, const JoinKeysLaunch& args);
absl::Status MlpActivation(CudaStream& stream, const MlpActivationLaunch& args);
absl::Status GatedAdd(CudaStream& stream, const GatedAddLaunch& args);

inline constexpr int kMostCudaExperts = 1024;
inline constexpr int kMostRouterHidden = 24576;  // a row of h in shared memory

absl::Status RouteExperts(CudaStream& stream, const RouteLaunch& args);
// Tiles that pairs of so many experts need at most.
int32_t MostExpertTiles(int64_t pairs, int experts, int tile_rows);
absl::Status PlaceExperts(CudaStream& stream, const PlaceLaunch& args);
absl::Status MultiplyExperts(CudaStream& stream, const ExpertGemmLaunch& args);
absl::Status SumExperts(CudaStream& stream, const ExpertSumLaunch& args);

}  // namespace dovetail::kernels::cuda
