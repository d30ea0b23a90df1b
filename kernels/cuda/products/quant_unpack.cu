#include <cuda_runtime.h>

#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/products/quant_codes.cuh"
#include "kernels/cuda/products/quant_launches.h"

// Weights in 4 or 8 bits, back to 16: for products of many rows, and for embeddings.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float Half(const void* base, int64_t at) {
  return __half2float(static_cast<const __half*>(base)[at]);
}

// Eight elements of a row from `column` on, a multiple of 8. They lie in one lane's chunk, except for groups of 16,
// where two lanes have four each.
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

// A decoded pair as 16-bit elements.
template <WireType kType>
__device__ __forceinline__ uint32_t Widen(uint32_t pair, float scale, float offset) {
  const float2 x = CodeMath<kType>::Unpack(CodeMath<kType>::ScaleX(pair));
  return CodeMath<kType>::Math::Pack(fmaf(x.x, scale, offset), fmaf(x.y, scale, offset));
}

// A warp takes a step of a tile: lanes read as in the products (quant_gemm.cuh), and have eight columns of two
// adjacent rows.
template <WireType kType, QuantKind kKind>
__global__ void __launch_bounds__(kThreads) UnpackKernel(const __grid_constant__ QuantUnpackLaunch p) {
  constexpr QuantTraits kTraits = TraitsOf(kKind);
  constexpr int kChunks = kTraits.code_bytes() / 512, kChunkColumns = kQuantStepColumns / kChunks;
  constexpr bool kFine = kTraits.group == 16;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int steps = p.w.steps(), tile = p.first / kQuantTileRows + static_cast<int>(at / steps);
  const int step = static_cast<int>(at % steps);
  if (tile * kQuantTileRows >= p.first + p.count) return;
  const int64_t where = static_cast<int64_t>(tile) * steps + step;
  const auto* const codes = static_cast<const uint4*>(p.w.codes) + where * (kTraits.code_bytes() / 16) + lane;
  const auto* const scales = static_cast<const __half*>(p.w.scales) + where * (kTraits.scale_bytes() / 2);
  uint4 chunks[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) chunks[c] = codes[32 * c];
  float factor[2];
#pragma unroll
  for (int high = 0; high < 2; ++high)
    factor[high] = p.w.factor[tile * kQuantTileRows + g + 8 * high] * RestOf<kType, kKind>(high != 0);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int half = 0; half < kChunkColumns / 32; ++half) {  // 32 columns
      uint32_t out[2][4];                                    // rows g and g + 8, eight columns
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[4];
        Decode<kType, kKind>(chunks[c], 2 * half + s, a);
        const int group = (c * kChunkColumns + 32 * half + (kFine ? 16 * s : 0)) / kTraits.group;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          float scale = factor[high], offset = 0;
          if constexpr (kTraits.values > 0) {
            const int slot = (g * (kQuantStepColumns / kTraits.group) + group) * 2 * kTraits.values + high;
            scale *= __half2float(scales[slot]);
            if constexpr (kTraits.values > 1)  // which is no code, but taken as many times too large (OffsetFactor)
              offset = __half2float(scales[slot + 2]) * (factor[high] * CodeMath<kType>::kCodeUnit);
          }
          out[high][2 * s] = Widen<kType>(a[high], scale, offset);
          out[high][2 * s + 1] = Widen<kType>(a[2 + high], scale, offset);
        }
      }
      const int column = step * kQuantStepColumns + c * kChunkColumns + 32 * half;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int row = p.w.RowOf(tile, g + 8 * high) - p.first;
        if (row < 0 || row >= p.count) continue;
        auto* const to = static_cast<uint16_t*>(p.out) + row * p.out_stride + column;
        if constexpr (kFine) {
          if (column + 4 * t < p.w.cols) *reinterpret_cast<uint2*>(to + 4 * t) = make_uint2(out[high][0], out[high][1]);
          if (column + 16 + 4 * t < p.w.cols)
            *reinterpret_cast<uint2*>(to + 16 + 4 * t) = make_uint2(out[high][2], out[high][3]);
        } else if (column + 8 * t < p.w.cols) {
          *reinterpret_cast<uint4*>(to + 8 * t) = make_uint4(out[high][0], out[high][1], out[high][2], out[high][3]);
        }
      }
    }
  }
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

int GetQuantDevice(QuantDevice* device) {
  int id = 0;
  *device = {};
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return static_cast<int>(error);
}

int LaunchQuantGemm(const QuantGemmLaunch* launch, void* stream) {
  if (launch->m == 0 || launch->w.rows == 0) return 0;
  QuantDevice device;
  const int error = GetQuantDevice(&device);
  if (error != 0) return error;
  QuantPart part;
  static_cast<QuantGemmLaunch&>(part) = *launch;
  return launch->type == WireType::kBF16 ? LaunchQuantGemmBF16(part, device, stream)
                                         : LaunchQuantGemmF16(part, device, stream);
}

int LaunchQuantUnpack(const QuantUnpackLaunch* launch, void* stream) {
  if (launch->count == 0) return 0;
  const int first = launch->first / kQuantTileRows;
  const int64_t tiles = (launch->first + launch->count + kQuantTileRows - 1) / kQuantTileRows - first;
  const auto blocks = static_cast<unsigned>((tiles * launch->w.steps() + kThreads / 32 - 1) / (kThreads / 32));
  const auto s = static_cast<cudaStream_t>(stream);
  return ForKind(launch->w.kind, [&]<QuantKind kKind>() {
    if (launch->type == WireType::kBF16) {
      UnpackKernel<WireType::kBF16, kKind><<<blocks, kThreads, 0, s>>>(*launch);
    } else {
      UnpackKernel<WireType::kF16, kKind><<<blocks, kThreads, 0, s>>>(*launch);
    }
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
