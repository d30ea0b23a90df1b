#include <cstdint>

#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/state/state_launches.h"
#include "kernels/cuda/state/state_rows.cuh"

// Tokens of a linear state one after the other: decode, verification, short chunks. A thread block has one head and a
// slice of 32 value columns, which depend on no others: S of the slice lies in registers from its one read on, each
// row with the threads of one group. A token's o and u are sums over rows of S and over tokens of the block, in one
// reduction; S is written once a block of 64 tokens.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = 4, kTokens = kStateTokens;
constexpr int kWarpKeys = kTokens / kWarps;  // tokens whose keys a warp multiplies
constexpr int kStage = 16;                   // tokens that are added to S at a time

__device__ __forceinline__ float Dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ void Add(float4& sum, float factor, float4 x) {
  sum.x += factor * x.x, sum.y += factor * x.y, sum.z += factor * x.z, sum.w += factor * x.w;
}
__device__ __forceinline__ float4 Powers(float4 x) { return {Exp2(x.x), Exp2(x.y), Exp2(x.z), Exp2(x.w)}; }

template <bool kVector, bool kDelta, int kKeys, int kSlice>
class Appender {
  static constexpr int kQuarters = kSlice / 4;                    // threads with different columns
  static constexpr int kGroups = kThreads / kQuarters;            // threads with different rows
  static constexpr int kRegs = kKeys / kGroups;                   // rows of S, a thread
  static constexpr int kQuads = kKeys > 128 ? 2 : 1;              // of channels, a lane
  static constexpr int kOwn = (kKeys + kThreads - 1) / kThreads;  // channels, a thread

 public:
  struct Shared {
    // Where rows of the parts of a block lie: found once for all threads.
    std::byte *state_rows[kKeys], *key_rows[kTokens], *value_rows[kTokens], *decay_rows[kTokens];
    alignas(16) float q[kKeys], k[kKeys];
    alignas(16) float query[kVector ? kKeys : 4], recall[kVector ? kKeys : 4];  // faded to the block's beginning
    alignas(16) float decay[kVector ? kKeys : 4];                               // log, of the token
    alignas(16) float total[kVector ? kKeys : 4];                               // of the block so far
    alignas(16) float range[kVector ? kWarps : 1][kVector ? kKeys : 4];         // log, of a warp's tokens
    float dots[2][kTokens];                                                     // of q and k with the keys of the block
    float fade[kTokens];                                                        // scalar: from token j to this one
    float v[kSlice], skip[kSlice];
    float reduce[kWarps][2][kSlice];
    float sums[kWarps][2];
    alignas(16) float keys[kStage][kKeys];  // faded to the end of the block
  };

  __device__ Appender(const StateLaunch& launch, Shared& shared) : p(launch), s(shared) {
    const StateUnit unit = UnitOf(p, blockIdx.x);
    item = p.items[unit.item];
    head = unit.head;
    writes = blockIdx.y == 0 || item.rows > 1;
    first_column = blockIdx.y * kSlice;
    column = first_column + 4 * quad;
  }

  __device__ void Run() {
    const int64_t first = item.first_position / kTokens;
    if (first > 0) {
      FindRows(BlockOf(p, item, head, first - 1), p.layout.state, s.state_rows);
      __syncthreads();
      LoadState();
    } else {
#pragma unroll
      for (int m = 0; m < kRegs; ++m) state[m] = make_float4(0, 0, 0, 0);
    }
    for (int row = 0; row < item.rows; ++row) {
      const int64_t position = item.first_position + row;
      t = static_cast<int>(position % kTokens);
      __syncthreads();
      if (row == 0 || t == 0) {
        FindTokens(position / kTokens);
        __syncthreads();
      }
      LoadToken(row);
      LoadValues();
      FadeAndMultiplyKeys();
      __syncthreads();
      MultiplyState();
      __syncthreads();
      if (threadIdx.x < kSlice) Finish(row);
      if (t == kTokens - 1) Advance(position / kTokens);
    }
  }

 private:
  __device__ __forceinline__ void FindRows(const StateBlock& of, const StateSection& section, std::byte** rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < section.rows; i += kThreads) rows[i] = of.Row(section, i);
  }
  // Of the block of tokens at hand.
  __device__ __forceinline__ void FindTokens(int64_t number) {
    const StateBlock block = BlockOf(p, item, head, number);
    FindRows(block, p.layout.keys, s.key_rows);
    FindRows(block, p.layout.values, s.value_rows);
    FindRows(block, p.layout.decays, s.decay_rows);
    if (threadIdx.x == 0) ForgetMidway(p, block, first_column);
  }

  __device__ __forceinline__ void LoadState() {
    std::byte* const* const rows = s.state_rows;
#pragma unroll
    for (int m = 0; m < kRegs; ++m) {
      const int row = group + kGroups * m;
      state[m] = make_float4(0, 0, 0, 0);
      if (row >= p.key_dim || column >= p.layout.value_stride) continue;
      const std::byte* at = rows[row];
      if (p.state_bf16) {
        state[m] = WidenBF16(*reinterpret_cast<const uint2*>(at + 2 * column));
      } else {
        state[m] = *reinterpret_cast<const float4*>(at + 4 * column);
      }
    }
  }

  // q, k, v and gates of the token; its key, decay and inputs go to the block.
  __device__ __forceinline__ void LoadToken(int row) {
    float q[kOwn], k[kOwn], squares[2] = {0, 0};
    std::byte* history = nullptr;
    if (p.conv_width > 0)
      history = BlockOf(p, item, head, (item.first_position + row) / kTokens).Row(p.layout.history, t);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = threadIdx.x + i * kThreads;
      q[i] = k[i] = 0;
      if (c < p.key_dim) {
        float raw_q, raw_k;
        q[i] = StateInput(p, item, head, row, c, raw_q);
        k[i] = StateInput(p, item, head, row, p.key_dim + c, raw_k);
        if (history != nullptr && writes) {
          StoreWire(p.wire, history, c, raw_q);
          StoreWire(p.wire, history, p.key_dim + c, raw_k);
        }
      }
      squares[0] += q[i] * q[i];
      squares[1] += k[i] * k[i];
    }
    const float* gates = p.gates > 0 ? GatesOf(p, item, head, row) : nullptr;
    rate = p.token_rate ? gates[p.token_decay ? (kVector ? p.key_dim : 1) : 0] : 1.0f;
    if (!kVector) log_decay = fmaxf(p.token_decay ? gates[0] : p.log_decay[item.first_head + head], kLowestLogDecay);
    if (threadIdx.x < kSlice) {
      const int c = first_column + threadIdx.x;
      float v = 0, raw = 0;
      if (c < p.value_dim) {
        v = StateInput(p, item, head, row, 2 * p.key_dim + c, raw);
        if (history != nullptr) StoreWire(p.wire, history, 2 * p.key_dim + c, raw);
      }
      s.skip[threadIdx.x] = p.skip != nullptr ? p.skip[item.first_head + head] * v : 0.0f;
      s.v[threadIdx.x] = kDelta ? v : v * rate;
    }
    float scale_q = p.query_scale, scale_k = 1;
    if (p.normalise) {
      const float sum = TransposeSum(squares);
      if (lane < 2) s.sums[warp][lane] = sum;
      __syncthreads();
      scale_q *= rsqrtf(s.sums[0][0] + s.sums[1][0] + s.sums[2][0] + s.sums[3][0] + 1e-6f);
      scale_k = rsqrtf(s.sums[0][1] + s.sums[1][1] + s.sums[2][1] + s.sums[3][1] + 1e-6f);
    }
    StoreToken(q, k, scale_q, scale_k, gates);
  }

  __device__ __forceinline__ void StoreToken(const float (&q)[kOwn], const float (&k)[kOwn], float scale_q,
                                             float scale_k, const float* gates) {
    auto* const key_row = reinterpret_cast<__nv_bfloat16*>(s.key_rows[t]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c >= kKeys) continue;
      s.q[c] = q[i] * scale_q;
      s.k[c] = RoundBF16(k[i] * scale_k);
      if (writes && c < p.layout.key_stride) key_row[c] = __float2bfloat16_rn(s.k[c]);
      if constexpr (kVector) {
        s.decay[c] = c < p.key_dim ? RoundBF16(fmaxf(gates[c], kLowestLogDecay)) : 0.0f;
        if (writes && c < p.layout.key_stride)
          reinterpret_cast<__nv_bfloat16*>(s.decay_rows[t])[c] = __float2bfloat16_rn(s.decay[c]);
      }
    }
    if (!kVector && threadIdx.x == 0 && writes) reinterpret_cast<float*>(s.decay_rows[0])[t] = log_decay;
    __syncthreads();
  }

  // The thread's columns of values of earlier tokens: group, group + 16, ..
  __device__ __forceinline__ void LoadValues() {
    std::byte* const* const rows = s.value_rows;
#pragma unroll
    for (int i = 0; i < kTokens / kGroups; ++i) {
      const int j = group + kGroups * i;
      values[i] = make_uint2(0, 0);
      if (j < t && column < p.layout.value_stride) values[i] = *reinterpret_cast<const uint2*>(rows[j] + 2 * column);
    }
  }

  __device__ __forceinline__ void FadeAndMultiplyKeys() {
    const int begin = warp * kWarpKeys, end = min(begin + kWarpKeys, t);
    float4 later[kQuads];  // vector: log2 of the decay from the warp's last token to this one
    if constexpr (kVector) {
      SumRange(begin, end);
      __syncthreads();
      StoreFaded();
#pragma unroll
      for (int h = 0; h < kQuads; ++h) {
        const int c = 4 * lane + 128 * h;
        later[h] = make_float4(0, 0, 0, 0);
        if (c >= kKeys) continue;
        later[h] = *reinterpret_cast<const float4*>(&s.decay[c]);
        for (int w = warp + 1; w < kWarps; ++w) Add(later[h], 1, *reinterpret_cast<const float4*>(&s.range[w][c]));
        later[h].x *= kLog2E, later[h].y *= kLog2E, later[h].z *= kLog2E, later[h].w *= kLog2E;
      }
    } else if (warp == 0) {
      ScanDecays();
    }
    if (warp == kWarps - 1) MultiplyOwnKey();
    MultiplyKeys(begin + kWarpKeys / 2, end, later);
    MultiplyKeys(begin, end, later);
  }

  __device__ __forceinline__ void SumRange(int begin, int end) {
    std::byte* const* const rows = s.decay_rows;
#pragma unroll
    for (int h = 0; h < kQuads; ++h) {
      const int c = 4 * lane + 128 * h;
      if (c >= kKeys) continue;
      float4 sum = make_float4(0, 0, 0, 0);
      if (c < p.layout.key_stride) {
#pragma unroll 8
        for (int j = begin; j < end; ++j) Add(sum, 1, WidenBF16(*reinterpret_cast<const uint2*>(rows[j] + 2 * c)));
      }
      *reinterpret_cast<float4*>(&s.range[warp][c]) = sum;
    }
  }

  __device__ __forceinline__ void StoreFaded() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c >= kKeys) continue;
      const float total = __expf(s.decay[c] + s.range[0][c] + s.range[1][c] + s.range[2][c] + s.range[3][c]);
      s.query[c] = s.q[c] * total;
      s.recall[c] = s.k[c] * total;
      s.total[c] = total;
    }
  }

  // Scalar decays: s.fade and s.total[0], by one warp.
  __device__ __forceinline__ void ScanDecays() {
    const auto* const decays = reinterpret_cast<const float*>(s.decay_rows[0]);
    const auto of = [&](int j) { return j < t ? decays[j] : j == t ? log_decay : 0.0f; };
    float low = of(lane), high = of(lane + 32);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more_low = __shfl_down_sync(~0u, low, step), more_high = __shfl_down_sync(~0u, high, step);
      if (lane + step < 32) low += more_low, high += more_high;
    }
    const float upper = __shfl_sync(~0u, high, 0);
    const float after_low = __shfl_down_sync(~0u, low, 1), after_high = __shfl_down_sync(~0u, high, 1);
    s.fade[lane] = __expf(upper + (lane < 31 ? after_low : 0.0f));
    s.fade[lane + 32] = __expf(lane < 31 ? after_high : 0.0f);
    if (lane == 0) s.total[0] = __expf(low + upper);
  }

  __device__ __forceinline__ void MultiplyOwnKey() {
    float sum = 0;
#pragma unroll
    for (int h = 0; h < kQuads; ++h) {
      const int c = 4 * lane + 128 * h;
      if (c < kKeys) sum += Dot(*reinterpret_cast<const float4*>(&s.q[c]), *reinterpret_cast<const float4*>(&s.k[c]));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) s.dots[0][t] = sum;
  }

  // Dots with up to 8 keys from `begin` on, from the last to the first.
  __device__ __forceinline__ void MultiplyKeys(int begin, int end, float4 (&later)[kQuads]) {
    constexpr int kCount = kWarpKeys / 2, kKinds = kDelta ? 2 : 1;
    if (begin >= end) return;
    float sums[kKinds * kCount] = {};
    std::byte *const *const key_rows = s.key_rows, *const *const decay_rows = s.decay_rows;
#pragma unroll
    for (int h = 0; h < kQuads; ++h) {
      const int c = 4 * lane + 128 * h;
      const bool there = c < p.layout.key_stride;
      uint2 raw[kCount], decays[kVector ? kCount : 1];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw[i] = make_uint2(0, 0);
        if constexpr (kVector) decays[i] = make_uint2(0, 0);
        if (!there || begin + i >= end) continue;
        raw[i] = *reinterpret_cast<const uint2*>(key_rows[begin + i] + 2 * c);
        if constexpr (kVector) decays[i] = *reinterpret_cast<const uint2*>(decay_rows[begin + i] + 2 * c);
      }
      float4 q = make_float4(0, 0, 0, 0), k = q;
      if (c < kKeys) {
        q = *reinterpret_cast<const float4*>(&s.q[c]);
        k = *reinterpret_cast<const float4*>(&s.k[c]);
      }
#pragma unroll
      for (int i = kCount - 1; i >= 0; --i) {
        float4 key = WidenBF16(raw[i]);
        if constexpr (kVector) {
          const float4 fade = Powers(later[h]);
          key.x *= fade.x, key.y *= fade.y, key.z *= fade.z, key.w *= fade.w;
          Add(later[h], kLog2E, WidenBF16(decays[i]));
        }
        sums[i] += Dot(q, key);
        if constexpr (kDelta) sums[kCount + i] += Dot(k, key);
      }
    }
    const float sum = TransposeSum(sums);
    if (lane < kCount && begin + lane < end) s.dots[0][begin + lane] = sum;  // the token's own is another warp's
    if (kDelta && lane >= kCount && begin + lane - kCount < end && lane < 2 * kCount)
      s.dots[1][begin + lane - kCount] = sum;
  }

  // Rows of S and tokens of the block, for the thread's columns; summed over groups.
  __device__ __forceinline__ void MultiplyState() {
    float4 o = make_float4(0, 0, 0, 0), recalled = o;
    const float* const query = kVector ? s.query : s.q;
    const float* const recall = kVector ? s.recall : s.k;
#pragma unroll
    for (int m = 0; m < kRegs; ++m) {
      const int row = group + kGroups * m;
      Add(o, query[row], state[m]);
      if constexpr (kDelta) Add(recalled, recall[row], state[m]);
    }
    if constexpr (!kVector) {
      const float total = s.total[0];
      o.x *= total, o.y *= total, o.z *= total, o.w *= total;
      recalled.x *= total, recalled.y *= total, recalled.z *= total, recalled.w *= total;
    }
#pragma unroll
    for (int i = 0; i < kTokens / kGroups; ++i) {
      const int j = group + kGroups * i;
      if (j >= t) break;
      const float4 value = WidenBF16(values[i]);
      const float fade = kVector ? 1.0f : s.fade[j];
      Add(o, s.dots[0][j] * fade, value);
      if constexpr (kDelta) Add(recalled, s.dots[1][j] * fade, value);
    }
    float sums[8] = {o.x, o.y, o.z, o.w, recalled.x, recalled.y, recalled.z, recalled.w};
#pragma unroll
    for (int i = 0; i < (kDelta ? 8 : 4); ++i) {
#pragma unroll
      for (int step = kQuarters; step < 32; step *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    }
    if (lane >= kQuarters) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.reduce[warp][0][4 * quad + i] = sums[i];
      if constexpr (kDelta) s.reduce[warp][1][4 * quad + i] = sums[4 + i];
    }
  }

  // A thread a column: u goes to the block, o to the payload.
  __device__ __forceinline__ void Finish(int row) {
    const int i = threadIdx.x, c = first_column + i;
    if (c >= p.layout.value_stride) return;
    float u = s.v[i];
    if constexpr (kDelta)
      u = rate * (u - (s.reduce[0][1][i] + s.reduce[1][1][i] + s.reduce[2][1][i] + s.reduce[3][1][i]));
    u = RoundBF16(u);
    reinterpret_cast<__nv_bfloat16*>(s.value_rows[t])[c] = __float2bfloat16_rn(u);
    if (c >= p.value_dim) return;
    const float o = s.reduce[0][0][i] + s.reduce[1][0][i] + s.reduce[2][0][i] + s.reduce[3][0][i];
    StoreWire(p.wire, p.out + item.out_offset, (static_cast<int64_t>(row) * item.heads + head) * p.value_dim + c,
              o + s.dots[0][t] * u + s.skip[i]);
  }

  // S after the block.
  __device__ __forceinline__ void Advance(int64_t number) {
    FindRows(BlockOf(p, item, head, number), p.layout.state, s.state_rows);
#pragma unroll
    for (int m = 0; m < kRegs; ++m) {
      const float total = s.total[kVector ? group + kGroups * m : 0];
      state[m].x *= total, state[m].y *= total, state[m].z *= total, state[m].w *= total;
    }
    float later[kOwn] = {};  // vector: log decay after the token
    std::byte *const *const key_rows = s.key_rows, *const *const decay_rows = s.decay_rows;
    std::byte* const* const value_rows = s.value_rows;
    for (int begin = kTokens - kStage; begin >= 0; begin -= kStage) {
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int c = threadIdx.x + n * kThreads;
        if (c >= kKeys) continue;
#pragma unroll 4
        for (int i = kStage - 1; i >= 0; --i) {
          float key = 0;
          if (c < p.layout.key_stride)
            key = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(key_rows[begin + i])[c]);
          s.keys[i][c] = key * (kVector ? __expf(later[n]) : s.fade[begin + i]);
          if (kVector && c < p.layout.key_stride)
            later[n] += __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(decay_rows[begin + i])[c]);
        }
      }
      __syncthreads();
      if (column >= p.layout.value_stride) continue;
#pragma unroll 4
      for (int i = 0; i < kStage; ++i) {
        const float4 u = WidenBF16(*reinterpret_cast<const uint2*>(value_rows[begin + i] + 2 * column));
#pragma unroll
        for (int m = 0; m < kRegs; ++m) Add(state[m], s.keys[i][group + kGroups * m], u);
      }
    }
    StoreState();
  }

  __device__ __forceinline__ void StoreState() {
    if (column >= p.layout.value_stride) return;
#pragma unroll
    for (int m = 0; m < kRegs; ++m) {
      const int row = group + kGroups * m;
      if (row >= p.key_dim) continue;
      std::byte* at = s.state_rows[row];
      if (p.state_bf16) {
        const uint2 rounded = RoundBF16x4(state[m]);
        *reinterpret_cast<uint2*>(at + 2 * column) = rounded;
        state[m] = WidenBF16(rounded);
      } else {
        *reinterpret_cast<float4*>(at + 4 * column) = state[m];
      }
    }
  }

  const StateLaunch& p;
  Shared& s;
  StateItem item;
  bool writes;  // what all slices share: one of them does, unless it reads that again
  int head, first_column, column, t = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x / kQuarters,
            quad = threadIdx.x % kQuarters;
  float rate = 1, log_decay = 0;
  float4 state[kRegs];
  uint2 values[kTokens / kGroups];
};

// Blocks of a multiprocessor: so many that their reads of S keep the memory busy.
template <int kKeys, int kSlice>
constexpr int kResident = kKeys* kSlice <= 128 * 32 ? 6 : 2;

template <bool kVector, bool kDelta, int kKeys, int kSlice>
__global__ void __launch_bounds__(kThreads, kResident<kKeys, kSlice>)
    StateAppendKernel(const __grid_constant__ StateLaunch p) {
  using Work = Appender<kVector, kDelta, kKeys, kSlice>;
  __shared__ typename Work::Shared shared;
  if (!IsVoid(p)) Work(p, shared).Run();
}

template <bool kVector, bool kDelta, int kKeys>
void LaunchSlices(const StateLaunch& p, cudaStream_t stream) {
  constexpr int kSlice = 32;
  const dim3 grid(p.unit_count, (p.layout.value_stride + kSlice - 1) / kSlice);
  StateAppendKernel<kVector, kDelta, kKeys, kSlice><<<grid, kThreads, 0, stream>>>(p);
}

template <bool kVector, bool kDelta>
void LaunchAppend(const StateLaunch& p, cudaStream_t stream) {
  if (p.key_dim <= 64) return LaunchSlices<kVector, kDelta, 64>(p, stream);
  if (p.key_dim <= 128) return LaunchSlices<kVector, kDelta, 128>(p, stream);
  LaunchSlices<kVector, kDelta, 256>(p, stream);
}

}  // namespace

int LaunchStateAppend(const StateLaunch* launch, void* stream) {
  const StateLaunch& p = *launch;
  auto* const on = static_cast<cudaStream_t>(stream);
  if (p.vector_decay) {
    p.delta ? LaunchAppend<true, true>(p, on) : LaunchAppend<true, false>(p, on);
  } else {
    p.delta ? LaunchAppend<false, true>(p, on) : LaunchAppend<false, false>(p, on);
  }
  return cudaGetLastError();
}

}  // namespace dovetail::kernels::cuda
