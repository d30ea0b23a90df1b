#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/rows/append_launches.h"

namespace dovetail::kernels::cuda {
namespace {

// Sine and cosine in double of the f32 angle: large angles lose nothing.
__global__ void __launch_bounds__(128) RopeTableKernel(const __grid_constant__ RopeTableLaunch p) {
  const int64_t at = blockIdx.x * 128ll + threadIdx.x;
  if (at >= static_cast<int64_t>(p.rows) * p.count) return;
  const float position = static_cast<float>(p.positions[at / p.count]);
  const double angle = static_cast<double>(__fmul_rn(position, p.inv_freq[at % p.count]));
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  p.cos[at] = static_cast<float>(cosine) * p.multiplier;
  p.sin[at] = static_cast<float>(sine) * p.multiplier;
}

}  // namespace

int LaunchRopeTable(const RopeTableLaunch* launch, void* stream) {
  const int64_t n = static_cast<int64_t>(launch->rows) * launch->count;
  if (n == 0) return 0;
  RopeTableKernel<<<static_cast<unsigned>((n + 127) / 128), 128, 0, AsStream(stream)>>>(*launch);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
