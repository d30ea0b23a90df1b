#pragma once
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/state/state_args.h"

// Where the rows of a state block lie. Device code only.

namespace dovetail::kernels::cuda {

template <typename Pieces>
__device__ __forceinline__ std::byte* SectionRow(const Pieces& of, const StateSection& section, int row) {
  if (row < section.first_rows) return of.Piece(section.piece) + section.offset + row * section.row_bytes;
  row -= section.first_rows;
  const int beyond = row / section.piece_rows;
  return of.Piece(section.piece + 1 + beyond) + (row - beyond * section.piece_rows) * section.row_bytes;
}

// One block of one head.
struct StateBlock {
  const std::byte* const* entries;  // the block's, or its pieces
  int64_t step;                     // bytes from piece to piece; 0: each has an entry
  int64_t first;                    // pieces before the head's

  __device__ __forceinline__ std::byte* Piece(int piece) const {
    if (step == 0) return const_cast<std::byte*>(entries[piece]);
    return const_cast<std::byte*>(entries[0]) + (first + piece) * step;
  }
  __device__ __forceinline__ std::byte* Row(const StateSection& section, int row) const {
    return SectionRow(*this, section, row);
  }
  __device__ __forceinline__ bool kept() const { return entries[0] != nullptr; }
};

__device__ __forceinline__ StateBlock BlockOf(const StateLaunch& p, const StateItem& item, int head, int64_t block) {
  StateBlock out;
  const int64_t at = block - item.first_block;
  if (p.even) {
    out.entries = p.blocks + item.table + at;
    out.step = p.step;
    out.first = (static_cast<int64_t>(p.op) * item.heads + head) * p.pieces;
  } else {
    out.entries = p.blocks + item.table + (at * item.heads + head) * p.pieces;
    out.step = 0;
    out.first = 0;
  }
  return out;
}

// Whether `state` of a block has S midway, in the columns from `column` on.
template <typename Pieces>
__device__ __forceinline__ uint32_t& MidwayWord(const StateLaunch& p, const Pieces& block, int column) {
  return reinterpret_cast<uint32_t*>(SectionRow(block, p.layout.midway, 0))[column / kStateSlice];
}
__device__ __forceinline__ void ForgetMidway(const StateLaunch& p, const StateBlock& block, int column) {
  if (p.layout.midway.rows > 0) MidwayWord(p, block, column) = 0;
}

// Whether the launch is to do nothing. By all threads.
__device__ __forceinline__ bool IsVoid(const StateLaunch& p) {
  return p.failed != nullptr && *static_cast<const volatile uint64_t*>(p.failed) != 0;
}

__device__ __forceinline__ StateUnit UnitOf(const StateLaunch& p, int unit) {
  if (p.units != nullptr) return p.units[unit];
  const int item = unit / p.heads;
  return {item, unit - item * p.heads};
}

__device__ __forceinline__ float RoundBF16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Four bf16 as floats; 8-byte aligned.
__device__ __forceinline__ float4 WidenBF16(uint2 raw) {
  float4 x;
  x.x = __uint_as_float(raw.x << 16);
  x.y = __uint_as_float(raw.x & 0xffff0000u);
  x.z = __uint_as_float(raw.y << 16);
  x.w = __uint_as_float(raw.y & 0xffff0000u);
  return x;
}
__device__ __forceinline__ uint2 RoundBF16x4(float4 x) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  return {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

// One input channel of one token: the convolution over the last tokens (those before the item from its blocks), or the
// channel itself. `channel` counts q, k, v of the head; `raw` gets what came.
__device__ __forceinline__ float StateInput(const StateLaunch& p, const StateItem& item, int head, int row, int channel,
                                            float& raw) {
  const auto payload = [&](int r) {
    const int64_t at = static_cast<int64_t>(r) * item.heads + head;
    if (channel < p.key_dim) return LoadWire(p.wire, p.query + item.query_offset, at * p.key_dim + channel);
    if (channel < 2 * p.key_dim)
      return LoadWire(p.wire, p.key_value + item.key_offset, at * p.key_dim + channel - p.key_dim);
    return LoadWire(p.wire, p.key_value + item.value_offset, at * p.value_dim + channel - 2 * p.key_dim);
  };
  raw = payload(row);
  if (p.conv_width == 0) return raw;
  const int channels = 2 * p.key_dim + p.value_dim;
  const int64_t tap_step = static_cast<int64_t>(p.model_heads) * channels;
  const int64_t at = static_cast<int64_t>(item.first_head + head) * channels + channel;
  float sum = p.conv_bias != nullptr ? p.conv_bias[at] : 0.0f;
  for (int w = 0; w < p.conv_width; ++w) {
    const int r = row - (p.conv_width - 1) + w;
    const int64_t position = item.first_position + r;
    float x = 0;
    if (r >= 0) {
      x = payload(r);
    } else if (position >= 0) {
      const StateBlock block = BlockOf(p, item, head, position / kStateTokens);
      x = LoadWire(p.wire, block.Row(p.layout.history, static_cast<int>(position % kStateTokens)), channel);
    }
    sum += p.conv[w * tap_step + at] * x;
  }
  return p.conv_linear ? sum : sum / (1 + __expf(-sum));
}

// Sixteen bytes of a payload: behind the gates of another item they may lie at any multiple of four.
__device__ __forceinline__ bool IsAligned(const void* at) { return (reinterpret_cast<uintptr_t>(at) & 15) == 0; }
__device__ __forceinline__ uint4 LoadPayload16(const std::byte* at) {
  if (IsAligned(at)) return *reinterpret_cast<const uint4*>(at);
  const auto* const words = reinterpret_cast<const uint32_t*>(at);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight input channels at once, of dimensions that are multiples of eight. `raw`: as they came.
__device__ __forceinline__ void StateInput8(const StateLaunch& p, const StateItem& item, int head, int row, int channel,
                                            float (&x)[8], uint4& raw) {
  const std::byte* base = p.query + item.query_offset;
  int dim = p.key_dim, at = channel;
  if (channel >= 2 * p.key_dim) {
    base = p.key_value + item.value_offset, dim = p.value_dim, at = channel - 2 * p.key_dim;
  } else if (channel >= p.key_dim) {
    base = p.key_value + item.key_offset, at = channel - p.key_dim;
  }
  const auto load = [&](int r) {
    return LoadPayload16(base + ((static_cast<int64_t>(r) * item.heads + head) * dim + at) * 2);
  };
  const auto widen = [&](uint4 bits, float(&out)[8]) { LoadWire8(p.wire, &bits, 0, out); };
  raw = load(row);
  if (p.conv_width == 0) return widen(raw, x);
  const int channels = 2 * p.key_dim + p.value_dim;
  const int64_t constant = static_cast<int64_t>(item.first_head + head) * channels + channel;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = p.conv_bias != nullptr ? p.conv_bias[constant + i] : 0.0f;
  for (int w = 0; w < p.conv_width; ++w) {
    const int r = row - (p.conv_width - 1) + w;
    const int64_t position = item.first_position + r;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (r >= 0) {
      bits = load(r);
    } else if (position >= 0) {
      const StateBlock block = BlockOf(p, item, head, position / kStateTokens);
      bits = *reinterpret_cast<const uint4*>(block.Row(p.layout.history, static_cast<int>(position % kStateTokens)) +
                                             2 * channel);
    }
    float tap[8];
    widen(bits, tap);
    const float* const weights = p.conv + w * static_cast<int64_t>(p.model_heads) * channels + constant;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += weights[i] * tap[i];
  }
  if (p.conv_linear) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] / (1 + __expf(-x[i]));
}

__device__ __forceinline__ const float* GatesOf(const StateLaunch& p, const StateItem& item, int head, int row) {
  return reinterpret_cast<const float*>(p.key_value + item.gate_offset) +
         (static_cast<int64_t>(row) * item.heads + head) * p.gates;
}

}  // namespace dovetail::kernels::cuda
