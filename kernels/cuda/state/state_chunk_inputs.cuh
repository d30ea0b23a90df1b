#pragma once
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/state/state_chunk_parts.cuh"
#include "kernels/cuda/state/state_launch.cuh"

// What comes into a chunk of 64 tokens: q and k into shared memory, v into the workspace, each after convolution and
// norms; what the token's block keeps of them into the block. Tokens of the block from before the item come from it.
// Device code only.

namespace dovetail::kernels::cuda {

template <int kKeys>
struct ChunkRows {
  static constexpr int kRow = kKeys + 8;  // elements from row to row
  alignas(16) __nv_bfloat16 q[kStateTokens * kRow];
  alignas(16) __nv_bfloat16 k[kStateTokens * kRow];
  float rate[kStateTokens];
};

// kCount: threads of the thread block, which all call.
template <int kKeys, bool kVector, bool kDelta, int kCount>
class ChunkInputs {
 protected:
  static constexpr int kTokens = kStateTokens, kRow = ChunkRows<kKeys>::kRow;
  static constexpr int kOwn = kKeys / 32;  // channels of a lane

  __device__ ChunkInputs(const StateLaunch& launch, ChunkRows<kKeys>& rows, const StateUnit& unit, int chunk)
      : p(launch), in(rows), item(p.items[unit.item]), head(unit.head), space(p, blockIdx.x, chunk) {
    const int64_t number = item.first_position / kTokens + chunk;
    block = BlockOf(p, item, head, number);
    first_row = static_cast<int>(number * kTokens - item.first_position);
    kept = block.kept();
    const int slice = threadIdx.x * kStateSlice;
    if (kept && slice < p.value_dim) ForgetMidway(p, block, slice);
  }

  __device__ __forceinline__ bool IsNew(int t) const { return first_row + t >= 0 && first_row + t < item.rows; }

  // q and k as they came, of tokens of the item or of its block.
  __device__ __forceinline__ void CopyHeads() {
    constexpr int kVectors = kKeys / 8;
    const uint32_t q_at = SharedAddress(in.q), k_at = SharedAddress(in.k);
    if (CopyWholeHeads(q_at, k_at)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens * kVectors; i += kCount) {
      const int t = i / kVectors, c = i % kVectors * 8, row = first_row + t;
      const int64_t at = (static_cast<int64_t>(row) * item.heads + head) * kKeys + c;
      const std::byte* const key =
          row < 0 ? block.Row(p.layout.keys, t) + 2 * c : p.key_value + item.key_offset + 2 * at;
      CopyPayloadAsync(q_at + 2 * (t * kRow + c), IsNew(t) ? p.query + item.query_offset + 2 * at : p.query, IsNew(t));
      CopyPayloadAsync(k_at + 2 * (t * kRow + c), row < item.rows ? key : p.query, row < item.rows);
    }
  }

  // The same where all tokens are the item's, and aligned.
  __device__ __forceinline__ bool CopyWholeHeads(uint32_t q_at, uint32_t k_at) const {
    constexpr int kVectors = kKeys / 8, kAtOnce = kCount / kVectors;  // rows
    const int row = threadIdx.x / kVectors, c = threadIdx.x % kVectors * 8;
    const int64_t at = 2 * ((static_cast<int64_t>(first_row + row) * item.heads + head) * kKeys + c);
    const std::byte* query = p.query + item.query_offset + at;
    const std::byte* key = p.key_value + item.key_offset + at;
    if (first_row < 0 || first_row + kTokens > item.rows || !IsAligned(query) || !IsAligned(key)) return false;
    const int64_t step = int64_t{2} * kAtOnce * item.heads * kKeys;
    const uint32_t place = 2 * (row * kRow + c);
    q_at += place, k_at += place;
#pragma unroll
    for (int i = 0; i < kTokens / kAtOnce; ++i, query += step, key += step) {
      CopyAsync(q_at + 2 * i * kAtOnce * kRow, query);
      CopyAsync(k_at + 2 * i * kAtOnce * kRow, key);
    }
    return true;
  }

  // q and k, eight channels a thread; kVectors of them are a token's.
  __device__ __forceinline__ void LoadHeads() {
    constexpr int kVectors = kKeys / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kTokens * kVectors; i += kCount) {
      const int t = i / kVectors, c = i % kVectors * 8, row = first_row + t;
      const bool there = c < p.key_dim, fresh = IsNew(t);
      float q[8] = {}, k[8] = {};
      uint4 raw_q, raw_k, key = make_uint4(0, 0, 0, 0);
      if (there && fresh) {
        StateInput8(p, item, head, row, c, q, raw_q);
        StateInput8(p, item, head, row, p.key_dim + c, k, raw_k);
      }
      float scale_q = direct ? 1.0f : p.query_scale, scale_k = 1;
      if (p.normalise) {
        float squares_q = 0, squares_k = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) squares_q += q[j] * q[j], squares_k += k[j] * k[j];
#pragma unroll
        for (int step = kVectors / 2; step > 0; step /= 2) {
          squares_q += __shfl_xor_sync(~0u, squares_q, step);
          squares_k += __shfl_xor_sync(~0u, squares_k, step);
        }
        scale_q *= rsqrtf(squares_q + 1e-6f);
        scale_k = rsqrtf(squares_k + 1e-6f);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) q[j] *= scale_q, k[j] *= scale_k;
      StoreWire8(WireType::kBF16, in.q, t * kRow + c, q);
      StoreWire8(WireType::kBF16, &key, 0, k);
      if (there && row < 0) key = *reinterpret_cast<const uint4*>(block.Row(p.layout.keys, t) + 2 * c);
      *reinterpret_cast<uint4*>(in.k + t * kRow + c) = key;
      if (!fresh || !kept || c >= p.layout.key_stride) continue;
      *reinterpret_cast<uint4*>(block.Row(p.layout.keys, t) + 2 * c) = key;
      if (p.conv_width == 0 || !there) continue;
      std::byte* const history = block.Row(p.layout.history, t);
      *reinterpret_cast<uint4*>(history + 2 * c) = raw_q;
      *reinterpret_cast<uint4*>(history + 2 * (p.key_dim + c)) = raw_k;
    }
  }

  // Whether v is not taken as it comes, or is kept here.
  __device__ __forceinline__ bool NeedsValues() const { return !values_direct || (!kDelta && kept); }
  __device__ __forceinline__ void LoadWideValues() {
    if (!NeedsValues()) return;
    const int width = StateChunkValues(p.value_dim), vectors = width / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kTokens * vectors; i += kCount) {
      const int t = i / vectors, c = i % vectors * 8, row = first_row + t;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (c < p.value_dim && row < 0) {
        bits = *reinterpret_cast<const uint4*>(block.Row(p.layout.values, t) + 2 * c);
      } else if (c < p.value_dim && row < item.rows) {
        float v[8];
        uint4 raw;
        StateInput8(p, item, head, row, 2 * p.key_dim + c, v, raw);
        StoreWire8(WireType::kBF16, &bits, 0, v);
        if (p.conv_width > 0 && kept)
          *reinterpret_cast<uint4*>(block.Row(p.layout.history, t) + 2 * (2 * p.key_dim + c)) = raw;
        if (!kDelta && row >= 0 && kept) {
          uint4 u;
#pragma unroll
          for (int j = 0; j < 8; ++j) v[j] *= in.rate[t];
          StoreWire8(WireType::kBF16, &u, 0, v);
          *reinterpret_cast<uint4*>(block.Row(p.layout.values, t) + 2 * c) = u;
        }
      }
      if (!values_direct) *reinterpret_cast<uint4*>(space.values + t * width + c) = bits;
    }
  }

  __device__ __forceinline__ void LoadToken(int t) {
    const int row = first_row + t;
    const bool old = row < 0, fresh = IsNew(t);
    std::byte* const history = fresh && p.conv_width > 0 && kept ? block.Row(p.layout.history, t) : nullptr;
    auto* const key_row =
        (fresh || old) && kept ? reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.keys, t)) : nullptr;
    float q[kOwn], k[kOwn], squares_q = 0, squares_k = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + 32 * i;
      q[i] = k[i] = 0;
      if (c >= p.key_dim) continue;
      if (old) k[i] = __bfloat162float(key_row[c]);
      if (!fresh) continue;
      float raw_q, raw_k;
      q[i] = StateInput(p, item, head, row, c, raw_q);
      k[i] = StateInput(p, item, head, row, p.key_dim + c, raw_k);
      squares_q += q[i] * q[i];
      squares_k += k[i] * k[i];
      if (history == nullptr) continue;
      StoreWire(p.wire, history, c, raw_q);
      StoreWire(p.wire, history, p.key_dim + c, raw_k);
    }
    float scale_q = direct ? 1.0f : p.query_scale, scale_k = 1;
    if (p.normalise && fresh) {
      scale_q *= rsqrtf(WarpSum(squares_q) + 1e-6f);
      scale_k = rsqrtf(WarpSum(squares_k) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + 32 * i;
      in.q[t * kRow + c] = __float2bfloat16_rn(q[i] * scale_q);
      const __nv_bfloat16 key = __float2bfloat16_rn(k[i] * scale_k);
      in.k[t * kRow + c] = key;
      if (fresh && key_row != nullptr && c < p.layout.key_stride) key_row[c] = key;
    }
    LoadValue(t, row, old, fresh, history);
  }

  __device__ __forceinline__ void LoadRate(int t) {
    float rate = first_row + t < 0 ? 1.0f : 0.0f;
    if (IsNew(t))
      rate = p.token_rate ? GatesOf(p, item, head, first_row + t)[p.token_decay ? (kVector ? p.key_dim : 1) : 0] : 1.0f;
    in.rate[t] = rate;
  }
  // v as it comes out of the convolution, or an old token's u.
  __device__ __forceinline__ void LoadValue(int t, int row, bool old, bool fresh, std::byte* history) {
    const int width = StateChunkValues(p.value_dim);
    for (int c = lane; c < width; c += 32) {
      float v = 0;
      if (c < p.value_dim && old)
        v = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(block.Row(p.layout.values, t))[c]);
      if (c < p.value_dim && fresh) {
        float raw;
        v = StateInput(p, item, head, row, 2 * p.key_dim + c, raw);
        if (history != nullptr) StoreWire(p.wire, history, 2 * p.key_dim + c, raw);
        if (!kDelta && kept)
          reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.values, t))[c] =
              __float2bfloat16_rn(RoundBF16(v) * in.rate[t]);
      }
      if (!values_direct) space.values[t * width + c] = __float2bfloat16_rn(v);
    }
  }

  const StateLaunch& p;
  ChunkRows<kKeys>& in;
  const StateItem item;
  const int head;
  const ChunkSpace<kKeys> space;
  StateBlock block;
  const bool direct = StateChunksAreDirect(p), values_direct = StateValuesAreDirect(p);
  bool kept;      // the block is
  int first_row;  // of the item: that of the block's first token, negative with old tokens
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
};

// A kernel of one thread block a chunk and head, which `Work` prepares: Shared, kThreads, kTogether (thread blocks on a
// multiprocessor at least), Run.
template <typename Work>
__global__ void __launch_bounds__(Work::kThreads, Work::kTogether)
    StateChunkPrepareKernel(const __grid_constant__ StateLaunch p) {
  extern __shared__ __align__(16) std::byte memory[];
  const StateUnit unit = UnitOf(p, blockIdx.x);
  const int chunk = p.chunk_begin + blockIdx.y;
  if (chunk >= ChunksOf(p.items[unit.item])) return;
  Work(p, *reinterpret_cast<typename Work::Shared*>(memory), unit, chunk).Run();
}
template <typename Work>
int LaunchStatePrepare(const StateLaunch& p, void* stream) {
  return LaunchStateKernel(StateChunkPrepareKernel<Work>, dim3(p.unit_count, p.chunk_end - p.chunk_begin),
                           Work::kThreads, sizeof(typename Work::Shared), p, stream);
}
// `Work` for the launch's keys and update.
template <template <int kKeys, bool kDelta> class Work>
int LaunchStatePrepareFor(const StateLaunch& p, void* stream) {
  if (p.key_dim <= 64)
    return p.delta ? LaunchStatePrepare<Work<64, true>>(p, stream) : LaunchStatePrepare<Work<64, false>>(p, stream);
  return p.delta ? LaunchStatePrepare<Work<128, true>>(p, stream) : LaunchStatePrepare<Work<128, false>>(p, stream);
}

}  // namespace dovetail::kernels::cuda
