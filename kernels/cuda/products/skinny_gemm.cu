#include "kernels/cuda/products/skinny_gemm.h"

#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/warp_arrivals.cuh"
#include "kernels/cuda/primitives/wire.cuh"

// One thread block a multiprocessor, each with tiles of 16 rows of w that follow each other. One warp copies pieces of
// a tile (16 rows x 1024 columns) into a ring of shared memory, as far ahead as that holds, and begins before the
// predecessor has ended; x, of which each block takes all, comes after. Eight warps multiply 128 columns each of a
// piece on the tensor cores, and add their sums at the end of a tile, in the order of the warps.
//
// Bulk copies of 1 KiB would be slower (gate and up of Llama-3-8B 74 us, of 2 KiB 55); copies of 16 bytes are as fast.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kMostRows = 8;  // of x, one side of a tensor core tile
constexpr int kWarps = 8;
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kTile = 16;                  // rows of w
constexpr int kColumns = 1024;             // of a piece
[[maybe_unused]] constexpr int kRun = 64;  // columns that a warp takes at a time
constexpr int kPadBytes = 64;              // of rows in shared memory: neighbours fall on different banks
constexpr int kRowBytes = kColumns * 2 + kPadBytes;
constexpr int kPieceBytes = kTile * kRowBytes;
constexpr int kMostStages = 6;
constexpr int kLeastStages = 3;
constexpr int kSumStep = 20;  // floats from row to row of x in a warp's sums: other banks
constexpr int kWarpSums = kMostRows * kSumStep;
constexpr int kSumBytes = 2 * kWarps * kWarpSums * 4;

struct SkinnyGemmLaunch {
  const std::byte* x = nullptr;
  const std::byte* w = nullptr;
  void* y = nullptr;
  const void* bias = nullptr;
  int64_t x_bytes = 0, w_bytes = 0, y_stride = 0;  // from row to row; y in elements
  int32_t m = 0, n = 0, k = 0;
  int32_t tiles = 0;  // of w
  int32_t stages = 0;
  WireType y_type = WireType::kBF16;
  int32_t accumulate = 0;
};

struct Shared {
  uint32_t ring, x, full, empty;
  float* sums;  // [2][warps][rows of x][kSumStep]
};

#if __CUDA_ARCH__ >= 900  // not launched on older GPUs
__device__ __forceinline__ void Produce(const SkinnyGemmLaunch& p, const Shared& shared, int first, int last,
                                        int lane) {
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = first; tile < last; ++tile) {
    const std::byte* const row = p.w + min(tile * kTile + lane % kTile, p.n - 1) * p.w_bytes;
    for (int column = 0; column < p.k; column += kColumns) {
      const int bytes = min(kColumns, p.k - column) * 2;
      const uint32_t full = shared.full + 8 * stage;
      BarrierWait(shared.empty + 8 * stage, parity);
      if (lane == 0) BarrierArriveExpect(full, bytes * kTile);
      __syncwarp();
      if (lane < kTile)
        BulkCopy(shared.ring + stage * kPieceBytes + lane * kRowBytes, row + int64_t{column} * 2, bytes, full);
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
  }
}

__device__ __forceinline__ void ConsumersMeet() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory"); }

__device__ __forceinline__ void StoreShared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void LoadX(const SkinnyGemmLaunch& p, uint32_t to, int step) {
  constexpr int kAtOnce = 8;
  const int runs = p.k / 8, total = p.m * runs;
  for (int base = threadIdx.x; base < total; base += kAtOnce * kWarps * 32) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * kWarps * 32, row = at / runs;
      if (at < total) v[i] = *reinterpret_cast<const uint4*>(p.x + row * p.x_bytes + (at - row * runs) * 16);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * kWarps * 32, row = at / runs;
      if (at < total) StoreShared16(to + row * step + (at - row * runs) * 16, v[i]);
    }
  }
}

// The tile's results, one a thread.
__device__ __forceinline__ void Finish(const SkinnyGemmLaunch& p, const float* sums, int tile) {
  const int at = threadIdx.x, x_row = at / kTile, row = tile * kTile + at % kTile;
  if (x_row >= p.m || row >= p.n) return;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp * kWarpSums + x_row * kSumStep + at % kTile];
  if (p.bias != nullptr) sum += LoadWire(p.y_type, p.bias, row);
  const int64_t to = x_row * p.y_stride + row;
  if (p.accumulate != 0) sum += LoadWire(p.y_type, p.y, to);
  StoreWire(p.y_type, p.y, to, sum);
}

// The products of a warp's part of a piece; g, t: a lane's row and place in a tensor core tile.
template <typename Math>
__device__ __forceinline__ void Multiply(const SkinnyGemmLaunch& p, uint32_t piece, uint32_t x, int column, int warp,
                                         int g, int t, float (&sums)[4]) {
#pragma unroll
  for (int run = 0; run < kColumns / kRun / kWarps; ++run) {
    const int at = (run * kWarps + warp) * kRun;
    if (column + at >= p.k) return;
    const uint32_t a_at = piece + g * kRowBytes + at * 2 + t * 16, b_at = x + (column + at) * 2 + t * 16;
    uint4 low[2], high[2], b[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      low[half] = LoadShared16(a_at + 64 * half);
      high[half] = LoadShared16(a_at + 8 * kRowBytes + 64 * half);
      b[half] = make_uint4(0, 0, 0, 0);
      if (g < p.m) b[half] = LoadShared16(b_at + 64 * half);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a0[4] = {low[half].x, high[half].x, low[half].y, high[half].y};
      const uint32_t a1[4] = {low[half].z, high[half].z, low[half].w, high[half].w};
      Math::Mma(sums, a0, b[half].x, b[half].y);
      Math::Mma(sums, a1, b[half].z, b[half].w);
    }
  }
}

template <typename Math>
__device__ __forceinline__ void Consume(const SkinnyGemmLaunch& p, const Shared& shared, int first, int last, int warp,
                                        int lane) {
  const int g = lane / 4, t = lane % 4, x_step = p.k * 2 + kPadBytes;
  WaitForPredecessor();
  LetSuccessorBegin();
  LoadX(p, shared.x, x_step);
  ConsumersMeet();
  int stage = 0, buffer = 0;
  uint32_t parity = 0;
  for (int tile = first; tile < last; ++tile) {
    float sums[4] = {};
    for (int column = 0; column < p.k; column += kColumns) {
      BarrierWait(shared.full + 8 * stage, parity);
      __syncwarp();
      Multiply<Math>(p, shared.ring + stage * kPieceBytes, shared.x + g * x_step, column, warp, g, t, sums);
      __syncwarp();
      if (kWarpArrivals == 32 || lane == 0) BarrierArrive(shared.empty + 8 * stage);
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
    // Two buffers: what was read of the one before is read by all once they meet again.
    float* const all = shared.sums + buffer * kWarps * kWarpSums;
    float* const to = all + warp * kWarpSums + 2 * t * kSumStep + g;
    to[0] = sums[0], to[kSumStep] = sums[1];
    to[8] = sums[2], to[kSumStep + 8] = sums[3];
    ConsumersMeet();
    if (threadIdx.x < kMostRows * kTile) Finish(p, all, tile);
    buffer ^= 1;
  }
}
#endif

template <typename Math>
__global__ void __launch_bounds__(kThreads, 1) SkinnyGemmKernel(const __grid_constant__ SkinnyGemmLaunch p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Shared shared;
  shared.ring = SharedAddress(memory);
  shared.x = shared.ring + p.stages * kPieceBytes;
  unsigned char* const sums = memory + p.stages * kPieceBytes + p.m * (p.k * 2 + kPadBytes);
  shared.sums = reinterpret_cast<float*>(sums);
  shared.full = SharedAddress(sums) + kSumBytes;
  shared.empty = shared.full + 8 * kMostStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      BarrierInit(shared.full + 8 * i, 1);
      BarrierInit(shared.empty + 8 * i, kWarps * kWarpArrivals);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const auto tile_of = [&](unsigned block) {
    return static_cast<int>(static_cast<int64_t>(block) * p.tiles / gridDim.x);
  };
  const int first = tile_of(blockIdx.x), last = tile_of(blockIdx.x + 1);
  if (warp == kWarps) {
    Produce(p, shared, first, last, lane);
  } else {
    Consume<Math>(p, shared, first, last, warp, lane);
  }
#endif
}

int64_t FixedBytes(const GemmCall& call) {
  return call.m * (call.k * 2 + kPadBytes) + kSumBytes + 2 * 8 * kMostStages + 128;
}

template <typename Math>
int Launch(SkinnyGemmLaunch p, int64_t fixed, const DeviceLimits& device, void* stream) {
  p.stages = static_cast<int>((device.shared_bytes - fixed) / kPieceBytes);
  if (p.stages > kMostStages) p.stages = kMostStages;
  const int bytes = static_cast<int>(fixed) + p.stages * kPieceBytes;
  const auto kernel = SkinnyGemmKernel<Math>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const int grid = p.tiles < device.multiprocessors ? p.tiles : device.multiprocessors;
  return LaunchDependent(kernel, dim3(grid), kThreads, bytes, static_cast<cudaStream_t>(stream), p);
}

}  // namespace

bool IsSkinnyGemm(const GemmCall& call, const DeviceLimits& device) {
  return device.major == 9 && call.m >= 1 && call.m <= kMostRows && call.n >= 1 && call.n < (int64_t{1} << 30) &&
         call.k >= 64 && call.k % 64 == 0 && call.k < (int64_t{1} << 24) && call.x_stride % 8 == 0 &&
         call.w_stride % 8 == 0 && reinterpret_cast<uintptr_t>(call.x) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(call.w) % 16 == 0 &&
         FixedBytes(call) + kLeastStages * kPieceBytes <= device.shared_bytes;
}

int LaunchSkinnyGemm(const GemmCall& call, const DeviceLimits& device, void* stream) {
  SkinnyGemmLaunch p;
  p.x = static_cast<const std::byte*>(call.x);
  p.w = static_cast<const std::byte*>(call.w);
  p.y = call.y;
  p.bias = call.bias;
  p.x_bytes = call.x_stride * 2;
  p.w_bytes = call.w_stride * 2;
  p.y_stride = call.y_stride;
  p.m = static_cast<int32_t>(call.m);
  p.n = static_cast<int32_t>(call.n);
  p.k = static_cast<int32_t>(call.k);
  p.tiles = (p.n + kTile - 1) / kTile;
  p.accumulate = call.accumulate;
  const int64_t fixed = FixedBytes(call);
  if (call.type == GemmType::kBF16) {
    p.y_type = call.y_is_f32 ? WireType::kF32 : WireType::kBF16;
    return Launch<BF16Math>(p, fixed, device, stream);
  }
  p.y_type = call.y_is_f32 ? WireType::kF32 : WireType::kF16;
  return Launch<F16Math>(p, fixed, device, stream);
}

}  // namespace dovetail::kernels::cuda
