#include "kernels/cuda/products/in_order_product.h"

#include <algorithm>

#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kTileWeights = 16;  // of w
constexpr int kTileInputs = 8;    // rows of x
constexpr int kThreads = 256;

// Two neighbouring elements of a row; zeros beyond the last column.
__device__ __forceinline__ uint32_t Pair(const void* row, int64_t column, int64_t columns) {
  return column < columns ? static_cast<const uint32_t*>(row)[column / 2] : 0;
}

__device__ __forceinline__ void StoreSum(const GemmCall& p, WireType y_type, int64_t part, int64_t row, int64_t column,
                                         float sum) {
  if (row >= p.m || column >= p.n) return;
  const int64_t at = part * p.part_step + row * p.y_stride + column;
  if (p.bias != nullptr) sum += LoadWire(y_type, p.bias, column);
  if (p.accumulate != 0) sum += LoadWire(y_type, p.y, at);
  StoreWire(y_type, p.y, at, sum);
}

// One warp: 16 columns of y for 8 rows.
template <typename Math>
__global__ void __launch_bounds__(32) InOrderKernel(const __grid_constant__ GemmCall p, WireType y_type) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTileWeights, row = int64_t{blockIdx.y} * kTileInputs;
  const int64_t part = blockIdx.z, parts = gridDim.z, k = p.k / parts;
  const auto w_row = [&](int64_t at) {
    return static_cast<const uint16_t*>(p.w) + min(at, p.n - 1) * p.w_stride + part * k;
  };
  const uint16_t *const low = w_row(column + g), *const high = w_row(column + g + 8);
  const uint16_t* const x = static_cast<const uint16_t*>(p.x) + min(row + g, p.m - 1) * p.x_stride + part * k;
  float sums[4] = {};
  for (int64_t at = 2 * t; at < k + 2 * t; at += 16) {
    const uint32_t a[4] = {Pair(low, at, k), Pair(high, at, k), Pair(low, at + 8, k), Pair(high, at + 8, k)};
    Math::Mma(sums, a, Pair(x, at, k), Pair(x, at + 8, k));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) StoreSum(p, y_type, part, row + 2 * t + i % 2, column + g + i / 2 * 8, sums[i]);
}

__global__ void __launch_bounds__(kThreads)
    CountUnlikeKernel(const uint32_t* a, const uint32_t* b, size_t words, uint32_t* count) {
  const size_t at = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < words && a[at] != b[at]) atomicAdd(count, 1u);
}

__global__ void __launch_bounds__(kThreads) SpreadKernel(WireType type, void* memory, size_t count) {
  const size_t at = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  uint64_t bits = (at + 1) * 0x9e3779b97f4a7c15ull;
  bits = (bits ^ bits >> 29) * 0xbf58476d1ce4e5b9ull;
  StoreWire(type, memory, static_cast<int64_t>(at), static_cast<float>(bits >> 40) * 0x1p-23f - 1);
}

}  // namespace

bool IsInOrderProduct(const GemmCall& call) {
  const int64_t parts = std::max<int64_t>(call.parts, 1);
  return call.k % (2 * parts) == 0 && call.x_stride % 2 == 0 && call.w_stride % 2 == 0 &&
         reinterpret_cast<uintptr_t>(call.x) % 4 == 0 && reinterpret_cast<uintptr_t>(call.w) % 4 == 0;
}

int LaunchInOrderProduct(const GemmCall& call, void* stream) {
  constexpr int64_t kMostTiles = 65535;  // of rows, in a launch
  const bool bf16 = call.type == GemmType::kBF16;
  const WireType y_type = call.y_is_f32 != 0 ? WireType::kF32 : bf16 ? WireType::kBF16 : WireType::kF16;
  const auto kernel = bf16 ? InOrderKernel<BF16Math> : InOrderKernel<F16Math>;
  for (int64_t first = 0; first < call.m; first += kMostTiles * kTileInputs) {
    GemmCall some = call;
    some.m = std::min(call.m - first, kMostTiles * kTileInputs);
    some.x = static_cast<const uint16_t*>(call.x) + first * call.x_stride;
    some.y = static_cast<std::byte*>(call.y) + first * call.y_stride * (call.y_is_f32 != 0 ? 4 : 2);
    const dim3 grid(static_cast<unsigned>((call.n + kTileWeights - 1) / kTileWeights),
                    static_cast<unsigned>((some.m + kTileInputs - 1) / kTileInputs),
                    static_cast<unsigned>(std::max(call.parts, 1)));
    kernel<<<grid, 32, 0, AsStream(stream)>>>(some, y_type);
  }
  return LastLaunchError();
}

int LaunchCountUnlike(const uint32_t* a, const uint32_t* b, size_t words, uint32_t* count, void* stream) {
  if (words > 0)
    CountUnlikeKernel<<<BlocksOf(static_cast<int64_t>(words), kThreads), kThreads, 0, AsStream(stream)>>>(a, b, words,
                                                                                                          count);
  return LastLaunchError();
}

int LaunchSpread(GemmType type, void* memory, size_t count, void* stream) {
  const WireType wire = type == GemmType::kBF16 ? WireType::kBF16 : WireType::kF16;
  if (count > 0)
    SpreadKernel<<<BlocksOf(static_cast<int64_t>(count), kThreads), kThreads, 0, AsStream(stream)>>>(wire, memory,
                                                                                                     count);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
