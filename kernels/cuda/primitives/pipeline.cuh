#pragma once
#include <cstdint>

#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/warp_arrivals.cuh"

// A ring of stages in shared memory that producers fill and consumers empty, each side in turns of its own, after
// CUTLASS's pipelines. Per stage there is a barrier "full", at which producers arrive, and one "empty", at which
// consumers do. Device code only.

namespace dovetail::kernels::cuda {

// Where one side stands in the ring.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int kStages>
class Pipeline {
 public:
  using State = PipelineState<kStages>;
  static constexpr int kBytes = 2 * kStages * 8;  // of its barriers

  // `barriers`: their address in shared memory, a multiple of 8.
  __device__ __forceinline__ explicit Pipeline(uint32_t barriers) : full_(barriers), empty_(barriers + 8 * kStages) {}

  // One thread, before all others use it. `producers`: arrivals that fill a stage. `consumers`: warps that empty one.
  __device__ __forceinline__ void Init(int producers, int consumers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      BarrierInit(full_ + 8 * stage, producers);
      BarrierInit(empty_ + 8 * stage, consumers * kWarpArrivals);
    }
  }

  // Until the stage is empty. At once in the first round.
  __device__ __forceinline__ void ProducerAcquire(const State& at) const {
    BarrierWait(empty_ + 8 * at.stage, at.parity ^ 1);
  }
  // The thread has stored what it had to.
  __device__ __forceinline__ void ProducerCommit(const State& at) const { BarrierArrive(full_ + 8 * at.stage); }
#if __CUDA_ARCH__ >= 900
  // The same for copies that arrive at Full(at) by themselves, so many bytes together.
  __device__ __forceinline__ void ProducerCommit(const State& at, uint32_t bytes) const {
    BarrierArriveExpect(full_ + 8 * at.stage, bytes);
  }
#endif
  __device__ __forceinline__ uint32_t Full(const State& at) const { return full_ + 8 * at.stage; }

  // Until the stage is full.
  __device__ __forceinline__ void ConsumerWait(const State& at) const { BarrierWait(full_ + 8 * at.stage, at.parity); }
  // All lanes of a warp call it, when they read the stage no more.
  __device__ __forceinline__ void ConsumerRelease(const State& at) const {
    __syncwarp();
    if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) BarrierArrive(empty_ + 8 * at.stage);
  }

 private:
  uint32_t full_, empty_;
};

}  // namespace dovetail::kernels::cuda
