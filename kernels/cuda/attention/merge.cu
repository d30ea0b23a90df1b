#include "kernels/cuda/attention/merge_launches.h"
#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

namespace dovetail::kernels::cuda {
namespace {

// One warp a (row, head).
__global__ void __launch_bounds__(128) MergeKernel(const __grid_constant__ MergeLaunch p) {
  const int lane = threadIdx.x % 32;
  const int64_t unit = blockIdx.x * 4ll + threadIdx.x / 32;
  if (unit >= static_cast<int64_t>(p.rows) * p.heads) return;
  const int row = static_cast<int>(unit / p.heads), head = static_cast<int>(unit % p.heads);
  const int begin = p.first[row], end = p.first[row + 1];
  float top = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
  for (int i = begin + lane; i < end; i += 32) {
    top = fmaxf(top, p.partial_ml[(static_cast<int64_t>(p.order[i]) * p.heads + head) * 2]);
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == -INFINITY) top = 0;
  float l = p.sinks != nullptr ? Exp2((p.sinks[head] - top) * kLog2E) : 0.0f;
  float o[8] = {};
  for (int i = begin; i < end; ++i) {
    const int64_t at = static_cast<int64_t>(p.order[i]) * p.heads + head;
    const float weight = Exp2((p.partial_ml[at * 2] - top) * kLog2E);
    l += weight * p.partial_ml[at * 2 + 1];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int dim = 2 * lane + 64 * j;
      if (dim >= p.value_dim) continue;
      const float2 x = *reinterpret_cast<const float2*>(p.partial_o + at * p.value_dim + dim);
      o[2 * j] += weight * x.x;
      o[2 * j + 1] += weight * x.y;
    }
  }
  const float inverse = l > 0 ? 1 / l : 0;
  const int64_t out = row * p.o_row_step + static_cast<int64_t>(head) * p.value_dim;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int dim = 2 * lane + 64 * j;
    if (dim < p.value_dim) StoreWirePair(p.o_type, p.o, out + dim, o[2 * j] * inverse, o[2 * j + 1] * inverse);
  }
}

}  // namespace

int LaunchMerge(const MergeLaunch* launch, void* stream) {
  const int64_t units = static_cast<int64_t>(launch->rows) * launch->heads;
  if (units == 0) return 0;
  MergeKernel<<<static_cast<unsigned>((units + 3) / 4), 128, 0, static_cast<cudaStream_t>(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace dovetail::kernels::cuda
