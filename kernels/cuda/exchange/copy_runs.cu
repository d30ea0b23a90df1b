#include "kernels/cuda/exchange/exchange_launches.h"
#include "kernels/cuda/primitives/enqueue.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kCopyThreads = 512;
constexpr int kInFlight = 4;  // loads of a thread

// Neighbouring threads copy neighbouring 16 bytes of a run, then of the next run of the row, then of the next row.
__global__ void __launch_bounds__(kCopyThreads) CopyRunsKernel(const __grid_constant__ CopyRunsLaunch p) {
  const uint32_t of_run = p.run_bytes / sizeof(int4), of_row = of_run * p.runs, count = of_row * p.rows;
  const uint32_t step = gridDim.x * kCopyThreads;
  const auto* from = static_cast<const char*>(p.from);
  auto* to = static_cast<char*>(p.to);
  for (uint32_t first = blockIdx.x * kCopyThreads + threadIdx.x; first < count; first += kInFlight * step) {
    int4 held[kInFlight];
    int64_t place[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const uint32_t i = first + j * step;
      if (i >= count) continue;
      const uint32_t row = i / of_row, in_row = i - row * of_row, run = in_row / of_run;
      const uint32_t byte = (in_row - run * of_run) * sizeof(int4);
      place[j] = row * p.to_row_step + run * p.to_run_step + byte;
      held[j] = __ldcg(reinterpret_cast<const int4*>(from + row * p.from_row_step + run * p.from_run_step + byte));
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (first + j * step < count) *reinterpret_cast<int4*>(to + place[j]) = held[j];
  }
}

}  // namespace

int LaunchCopyRuns(const CopyRunsLaunch* launch, void* stream) {
  const int64_t count = int64_t{launch->run_bytes} / 16 * launch->runs * launch->rows;
  if (count == 0) return 0;
  const unsigned needed = BlocksOf(count, kCopyThreads), most = launch->blocks, blocks = needed < most ? needed : most;
  CopyRunsKernel<<<blocks, kCopyThreads, 0, AsStream(stream)>>>(*launch);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
