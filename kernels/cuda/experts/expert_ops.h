#pragma once
#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Experts on a GPU; expert_args.h says what each op computes over which shapes. What experts read and write is counted
// on the device: nothing comes back to the host between routing and their sum.
//
// All: check, enqueue one kernel, return.
// Errors: kInvalidArgument, before anything runs, for null pointers, odd sizes or strides (elements are moved in pairs)
// and sizes outside the limits; kInternal if the device is lost.
// Threads: thread-safe on different streams.
// Memory: allocate nothing, and may be captured.
// Numbers: activations are in a wire type, sums in f32; a row's bits depend on that row and the size of the tiles only.
// Oracles: moe.h on the CPU; budgets in tests/kernels_cuda/.

inline constexpr int kMostCudaExperts = 1024;
inline constexpr int kMostRouterHidden = 24576;  // a row of h in shared memory

absl::Status RouteExperts(CudaStream& stream, const RouteLaunch& args);
// Tiles that pairs of so many experts need at most.
int32_t MostExpertTiles(int64_t pairs, int experts, int tile_rows);
absl::Status PlaceExperts(CudaStream& stream, const PlaceLaunch& args);
// The stream's device multiplies tiles of kGroupedTileRows.
absl::StatusOr<bool> GroupsProducts(CudaStream& stream);
// Products of n x k with each expert may have such tiles; n is that of a whole product, also with an activation.
bool FitsGroupedTiles(int64_t n, int64_t k);
absl::Status MultiplyExperts(CudaStream& stream, const ExpertGemmLaunch& args);
// Which rows' experts are multiplied pair by pair: a row alone, and rows of which most pairs have an expert to
// themselves.
bool MultipliesPairs(int64_t rows, int chosen, int experts);
absl::Status GatePairs(CudaStream& stream, const PairGateLaunch& args);
// Next after GatePairs of the same rows, or after a kernel that lets no successor begin (dependent_launch.cuh).
absl::Status SumPairs(CudaStream& stream, const PairSumLaunch& args);
// Sizes that codes of experts may have: a whole number of tiles each, and rows that fit into shared memory.
bool FitsExpertCodes(int64_t n, int64_t k);
absl::Status MultiplyExpertCodes(CudaStream& stream, const ExpertCodesLaunch& args);
absl::Status SumExperts(CudaStream& stream, const ExpertSumLaunch& args);
absl::Status GatedAdd(CudaStream& stream, const GatedAddLaunch& args);

}  // namespace dovetail::kernels::cuda
