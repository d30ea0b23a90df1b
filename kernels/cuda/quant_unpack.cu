#include <cuda_runtime.h>

#include "kernels/cuda/quant_codes.cuh"
#include "kernels/cuda/quant_launches.h"
#include "kernels/cuda/wire.cuh"

// Weights in 4 or 8 bits, back to 16: for products of many rows, and for embeddings.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float Half(const void* base, int64_t at) {
  return __half2float(static_cast<const __half*>(base)[at]);
}

// Eight elements of a row from `column` on, a multiple of 8. They lie in one lane's chunk, but for groups of 16, where
// two lanes have four each.
template <QuantKind kKind>
__device__ __forceinline__ void LoadEight(const QuantMatrix& w, int row, int column, float (&x)[8]) {
  constexpr QuantTraits kTraits = TraitsOf(kKind);
  const int tile = row / kQuantTileRows, in_tile = row % kQuantTileRows;
  const int step = column / kQuantStepColumns, in_step = column % kQuantStepColumns;
  const int64_t at = static_cast<int64_t>(tile) * w.steps() + step;
  const auto* codes = static_cast<const uint8_t*>(w.codes) + at * kTraits.code_bytes();
  const float factor = w.factor[row];
  float scale = 1, offset = 0;
  if constexpr (kTraits.values > 0) {
    const int64_t slot = at * (kTraits.scale_bytes() / 2) + ScaleSlotOf(kTraits, in_tile, in_step);
    scale = Half(w.scales, slot);
    if constexpr (kTraits.values > 1) offset = Half(w.scales, slot + 2) / OffsetFactor(kKind, row);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 4) {  // a word has four
    const QuantSlot slot = SlotOf(kTraits, in_tile, in_step + i);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + slot.byte / 4 * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t code;
      if constexpr (kTraits.bits == 4) {
        code = word >> (4 * (in_tile / 8 + 2 * (e / 2) + 4 * (e % 2))) & 15;
      } else {
        code = word >> (8 * (e / 2 + 2 * (e % 2))) & 255;
      }
      x[i + e] = factor * fmaf(scale, ValueOf(kKind, code), offset);
    }
  }
}

template <QuantKind kKind>
__global__ void __launch_bounds__(kThreads) UnpackKernel(const __grid_constant__ QuantUnpackLaunch p) {
  const int runs = (p.w.cols + 7) / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<int64_t>(p.count) * runs) return;
  const int row = static_cast<int>(at / runs), column = static_cast<int>(at % runs) * 8;
  float x[8];
  LoadEight<kKind>(p.w, p.first + row, column, x);
  StoreWire8(p.type, p.out, row * p.out_stride + column, x);
}

template <QuantKind kKind>
__global__ void __launch_bounds__(kThreads) EmbedQuantKernel(const __grid_constant__ QuantEmbedLaunch p) {
  const int row = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * 8;
  if (column >= p.w.cols) return;
  int32_t id = p.ids[row];
  if (id < 0) id = p.drawn[-1 - id].token;
  float x[8];
  LoadEight<kKind>(p.w, id, column, x);
#pragma unroll
  for (float& v : x) v *= p.factor;
  StoreWire8(p.out_type, p.out, static_cast<int64_t>(row) * p.w.cols + column, x);
}

template <typename Launch>
int ForKind(QuantKind kind, Launch&& launch) {
  switch (kind) {
    case QuantKind::kU4: launch.template operator()<QuantKind::kU4>(); break;
    case QuantKind::kU4Offset: launch.template operator()<QuantKind::kU4Offset>(); break;
    case QuantKind::kU8: launch.template operator()<QuantKind::kU8>(); break;
    case QuantKind::kU8Offset: launch.template operator()<QuantKind::kU8Offset>(); break;
    case QuantKind::kU8Group16: launch.template operator()<QuantKind::kU8Group16>(); break;
    case QuantKind::kFp4: launch.template operator()<QuantKind::kFp4>(); break;
    case QuantKind::kE4M3: launch.template operator()<QuantKind::kE4M3>(); break;
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int LaunchQuantGemm(const QuantGemmLaunch* launch, void* stream) {
  if (launch->m == 0 || launch->w.rows == 0) return 0;
  int id = 0;
  QuantDevice device = {};
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error != cudaSuccess) return static_cast<int>(error);
  QuantPart part;
  static_cast<QuantGemmLaunch&>(part) = *launch;
  return launch->type == WireType::kBF16 ? LaunchQuantGemmBF16(part, device, stream)
                                         : LaunchQuantGemmF16(part, device, stream);
}

int LaunchQuantUnpack(const QuantUnpackLaunch* launch, void* stream) {
  const int64_t threads = static_cast<int64_t>(launch->count) * ((launch->w.cols + 7) / 8);
  if (threads == 0) return 0;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  return ForKind(launch->w.kind, [&]<QuantKind kKind>() {
    UnpackKernel<kKind><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch);
  });
}

int LaunchQuantEmbed(const QuantEmbedLaunch* launch, void* stream) {
  if (launch->rows == 0 || launch->w.cols == 0) return 0;
  const dim3 grid((launch->w.cols / 8 + kThreads - 1) / kThreads, launch->rows);
  return ForKind(launch->w.kind, [&]<QuantKind kKind>() {
    EmbedQuantKernel<kKind><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch);
  });
}

}  // namespace dovetail::kernels::cuda
