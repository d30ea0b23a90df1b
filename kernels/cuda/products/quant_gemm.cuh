#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/products/quant_launches.h"
#include "kernels/cuda/products/quant_steps.cuh"

// Products of few rows with weights in 4 or 8 bits, bound by the memory that the codes come from. A thread block takes
// a range of tiles of W, and x whole in shared memory (quant_steps.cuh). Codes are read before the predecessor of the
// kernel has ended.

namespace dovetail::kernels::cuda {

inline constexpr int kQuantWarps = 16;
inline constexpr int kQuantThreads = kQuantWarps * 32;

template <WireType kType, QuantKind kKind, int kTiles>
__device__ __forceinline__ void StoreTile(const QuantPart& p, int tile, int row0, int m, const float (&sum)[kTiles][4],
                                          int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const int row = tile * kQuantTileRows + g + 8 * high;
    if (row >= p.w.rows) continue;
    const float factor = p.w.factor[row] * RestOf<kType, kKind>(high != 0);
    const WireType y_type = p.y_is_f32 ? WireType::kF32 : kType;
    const float bias = p.bias != nullptr ? LoadWire(y_type, p.bias, row) : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int out = 8 * n + 2 * t + e;
        if (out >= m) continue;
        const int64_t at = (row0 + out) * p.y_stride + row;
        float value = fmaf(sum[n][2 * high + e], factor, bias);
        if (p.accumulate) value += LoadWire(y_type, p.y, at);
        StoreWire(y_type, p.y, at, value);
      }
    }
  }
}

template <WireType kType, QuantKind kKind, int kTiles>
__global__ void __launch_bounds__(kQuantThreads, 1) QuantGemmKernel(const __grid_constant__ QuantPart p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int row0 = blockIdx.x * 8 * kTiles, m = min(8 * kTiles, p.m - row0);
  const QuantSteps<kQuantWarps> all(0, p.w.tiles(), p.steps, blockIdx.y, gridDim.y);
  const auto memory = QuantMemory::In<kKind, kTiles, kQuantWarps>(shared, p.steps);
  const auto fill = [&] {
    WaitForPredecessor();
    const auto* const x = static_cast<const uint16_t*>(p.x) + row0 * p.x_stride;
    const int columns = min(p.steps * kQuantStepColumns, p.w.cols - p.first_step * kQuantStepColumns);
    FillRows<kType, kKind, kQuantThreads>(p.steps, columns, m, memory.rows, memory.sums, memory.stride,
                                          [&](int row) { return x + row * p.x_stride; });
    __syncthreads();
  };
  const auto store = [&](int tile, const float(&sum)[kTiles][4]) {
    StoreTile<kType, kKind, kTiles>(p, tile, row0, m, sum, threadIdx.x % 32);
  };
  MultiplyTiles<kType, kKind, kTiles>(p.w, p.first_step, all, memory, m, fill, store);
}

template <WireType kType, QuantKind kKind, int kTiles>
int LaunchQuantTiles(QuantPart part, const QuantDevice& device, cudaStream_t stream) {
  const int most = part.m < 8 * kTiles ? part.m : 8 * kTiles;  // rows of a pass
  const int passes = (part.m + 8 * kTiles - 1) / (8 * kTiles);
  const int fixed = QuantMemory::FixedBytes<kKind, kTiles, kQuantWarps>(most);
  const int a_step = QuantMemory::StepBytes<kKind>(most);
  const int steps = part.w.steps(), room = (device.shared_bytes - fixed) / a_step;
  if (room < 1) return static_cast<int>(cudaErrorInvalidConfiguration);
  const int launches = (steps + room - 1) / room;
  if (launches > 1 && !part.y_is_f32) return kQuantTooWide;
  const auto kernel = QuantGemmKernel<kType, kKind, kTiles>;
  const int widest = (steps + launches - 1) / launches;
  const int shared_bytes = fixed + widest * a_step;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  int ranges = device.multiprocessors / passes;
  if (ranges > part.w.tiles()) ranges = part.w.tiles();
  if (ranges < 1) ranges = 1;
  const auto* const x = static_cast<const uint16_t*>(part.x);
  for (int i = 0; i < launches; ++i) {  // of a range of columns each; the first one adds the bias
    part.first_step = steps * i / launches;
    part.steps = steps * (i + 1) / launches - part.first_step;
    part.x = x + part.first_step * kQuantStepColumns;
    const int failed = LaunchDependent(kernel, dim3(passes, ranges), kQuantThreads, shared_bytes, stream, part);
    if (failed != 0) return failed;
    part.bias = nullptr;
    part.accumulate = 1;
  }
  return 0;
}

// Rows that do not fit into one launch are taken eight at a time.
template <WireType kType, QuantKind kKind>
int LaunchQuantKind(const QuantPart& part, const QuantDevice& device, cudaStream_t stream) {
  if (part.m > 8) {
    const int error = LaunchQuantTiles<kType, kKind, 2>(part, device, stream);
    if (error != kQuantTooWide) return error;
  }
  return LaunchQuantTiles<kType, kKind, 1>(part, device, stream);
}

template <WireType kType>
int LaunchQuantType(const QuantPart& part, const QuantDevice& device, cudaStream_t stream) {
  switch (part.w.kind) {
    case QuantKind::kU4: return LaunchQuantKind<kType, QuantKind::kU4>(part, device, stream);
    case QuantKind::kU4Offset: return LaunchQuantKind<kType, QuantKind::kU4Offset>(part, device, stream);
    case QuantKind::kU8: return LaunchQuantKind<kType, QuantKind::kU8>(part, device, stream);
    case QuantKind::kU8Offset: return LaunchQuantKind<kType, QuantKind::kU8Offset>(part, device, stream);
    case QuantKind::kU8Group16: return LaunchQuantKind<kType, QuantKind::kU8Group16>(part, device, stream);
    case QuantKind::kFp4: return LaunchQuantKind<kType, QuantKind::kFp4>(part, device, stream);
    case QuantKind::kE4M3: return LaunchQuantKind<kType, QuantKind::kE4M3>(part, device, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace dovetail::kernels::cuda
