#pragma once
#include "kernels/cuda/primitives/primitives.cuh"

// A warp's arrival at a barrier: one lane's, behind __syncwarp(), which orders what all lanes did before it.
// compute-sanitizer's racecheck (CUDA 13.0) takes only that lane's accesses as ordered by it and reports those of the
// other 31 as races. Built with -DDOVETAIL_ALL_LANES_ARRIVE all of them arrive, and racecheck reports what is left
// (docs/testing.md). Device code only.

namespace dovetail::kernels::cuda {

#ifdef DOVETAIL_ALL_LANES_ARRIVE
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// All lanes call it. Counts as kWarpArrivals of the barrier.
__device__ __forceinline__ void WarpArrive(uint64_t& bar) {
  __syncwarp();
  if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) BarrierArrive(SharedAddress(&bar));
}

}  // namespace dovetail::kernels::cuda
