#include "kernels/cuda/exchange/exchange_launches.h"
#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kWarps = 4, kMostDim = 256;

__device__ __forceinline__ bool Has(const ExchangePartial& partial, int row) {
  return row >= partial.first_row && row < partial.first_row + partial.rows;
}

// Of partial i: {m, l}; of one that has not the row, nothing.
__device__ __forceinline__ float2 LoadMl(const ExchangePartial& partial, int row, int head, int heads) {
  if (!Has(partial, row)) return make_float2(-INFINITY, 0);
  const int64_t at = static_cast<int64_t>(row - partial.first_row) * heads + head;
  return __ldcg(reinterpret_cast<const float2*>(partial.ml) + at);
}

// A thread block a row and head of a join. Each warp sums a run of the partials, and the runs are summed in order.
__global__ void __launch_bounds__(kWarps * 32) JoinsKernel(const __grid_constant__ ExchangeJoinsLaunch p) {
  __shared__ float sums[kWarps][kMostDim];
  __shared__ float weights[kWarps];
  const ExchangeJoin join = p.joins[blockIdx.x];
  const ExchangePartial* const partials = p.partials + join.first;
  const int row = static_cast<int>(blockIdx.y) / join.heads, head = static_cast<int>(blockIdx.y) % join.heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  WaitForPredecessor();
  if (row >= join.rows) return;
  const float sink = p.sinks != nullptr ? p.sinks[join.first_head + head] : -INFINITY;
  float top = sink;
  for (int i = lane; i < join.count; i += 32) top = fmaxf(top, LoadMl(partials[i], row, head, join.heads).x);
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == -INFINITY) top = 0;
  const int run = (join.count + kWarps - 1) / kWarps;
  const int begin = warp * run, end = min(begin + run, join.count);
  float l = 0, o[8] = {};
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    const ExchangePartial partial = partials[i];
    if (!Has(partial, row)) continue;
    const float2 ml = LoadMl(partial, row, head, join.heads);
    const float weight = Exp2((ml.x - top) * kLog2E);
    l += weight * ml.y;
    const float* const from =
        partial.o + (static_cast<int64_t>(row - partial.first_row) * join.heads + head) * p.value_dim;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int dim = 2 * lane + 64 * j;
      if (dim >= p.value_dim) continue;
      const float2 x = __ldcg(reinterpret_cast<const float2*>(from + dim));
      o[2 * j] += weight * x.x;
      o[2 * j + 1] += weight * x.y;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int dim = 2 * lane + 64 * j;
    if (dim >= p.value_dim) continue;
    sums[warp][dim] = o[2 * j];
    sums[warp][dim + 1] = o[2 * j + 1];
  }
  if (lane == 0) weights[warp] = l;
  __syncthreads();
  const int dim = 2 * static_cast<int>(threadIdx.x);
  if (dim >= p.value_dim) return;
  float all = p.sinks != nullptr ? Exp2((sink - top) * kLog2E) : 0.0f, x = 0, y = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    all += weights[i];
    x += sums[i][dim];
    y += sums[i][dim + 1];
  }
  const float inverse = all > 0 ? 1 / all : 0;
  const int64_t out = row * p.o_row_step + static_cast<int64_t>(head) * p.value_dim + dim;
  StoreWirePair(p.o_type, join.o, out, x * inverse, y * inverse);
}

}  // namespace

int LaunchExchangeJoins(const ExchangeJoinsLaunch* launch, void* stream) {
  return LaunchDependent(JoinsKernel, dim3(launch->count, launch->units), kWarps * 32, 0,
                         static_cast<cudaStream_t>(stream), *launch);
}

}  // namespace dovetail::kernels::cuda
