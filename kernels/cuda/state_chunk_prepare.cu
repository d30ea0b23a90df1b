#include "kernels/cuda/state_chunk_parts.cuh"
#include "kernels/cuda/state_launches.h"

// The first kernel of the chunked form: all that does not depend on S, one thread block a chunk of 64 tokens and head.
// Tokens of the block from before the item come from it, with their u in place of v and a row of the identity in the
// delta rule's system.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 128, kTokens = kStateTokens, kSystem = kTokens + 4;

template <int N, int kHalf = N / 2>
__device__ __forceinline__ float TransposeSum(float (&v)[N]) {
  if constexpr (kHalf > 0) {
    const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = upper ? v[i] : v[i + kHalf], kept = upper ? v[i + kHalf] : v[i];
      v[i] = kept + __shfl_xor_sync(~0u, given, kHalf);
    }
    return TransposeSum<N, kHalf / 2>(v);
  } else {
    return v[0];
  }
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <int kKeys, bool kVector, bool kDelta>
class Preparer {
  static constexpr int kRow = kKeys + 8;    // elements from row to row of q and k
  static constexpr int kDecay = kKeys + 4;  // floats from row to row of decays
  static constexpr int kOwn = kKeys / 32;   // channels of a lane

 public:
  struct Shared {
    alignas(16) __nv_bfloat16 q[kTokens * kRow];
    alignas(16) __nv_bfloat16 k[kTokens * kRow];
    float decay[kVector ? kTokens * kDecay : kTokens];  // logarithms, then summed from the block's beginning
    float system[kDelta ? kTokens * kSystem : 4];       // beta A, strictly below the diagonal
    float rate[kTokens];
  };

  __device__ Preparer(const StateLaunch& launch, Shared& shared, const StateUnit& unit, int chunk)
      : p(launch), s(shared), item(p.items[unit.item]), head(unit.head), space(p, blockIdx.x, chunk) {
    const int64_t number = item.first_position / kTokens + chunk;
    block = BlockOf(p, item, head, number);
    first_row = static_cast<int>(number * kTokens - item.first_position);
    kept = block.kept();
  }

  __device__ void Run() {
    if (p.key_dim % 8 == 0 && p.value_dim % 8 == 0) {
      LoadHeads();
      LoadWideValues();
      for (int t = warp; t < kTokens; t += kThreads / 32) LoadGates(t, first_row + t, first_row + t < 0, IsNew(t));
    } else {
      for (int t = warp; t < kTokens; t += kThreads / 32) LoadToken(t);
    }
    __syncthreads();
    SumDecays();
    __syncthreads();
    StoreFaded();
    if constexpr (kVector) {
      MultiplyBefore();
      MultiplyDiagonal();
    } else {
      Multiply();
    }
    if constexpr (!kDelta) return;
    __syncthreads();
    if (threadIdx.x < kTokens) Invert();
  }

 private:
  __device__ __forceinline__ bool IsNew(int t) const { return first_row + t >= 0 && first_row + t < item.rows; }

  // q and k, eight channels a thread; kVectors of them are a token's.
  __device__ __forceinline__ void LoadHeads() {
    constexpr int kVectors = kKeys / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kTokens * kVectors; i += kThreads) {
      const int t = i / kVectors, c = i % kVectors * 8, row = first_row + t;
      const bool there = c < p.key_dim, fresh = IsNew(t);
      float q[8] = {}, k[8] = {};
      uint4 raw_q, raw_k, key = make_uint4(0, 0, 0, 0);
      if (there && fresh) {
        StateInput8(p, item, head, row, c, q, raw_q);
        StateInput8(p, item, head, row, p.key_dim + c, k, raw_k);
      }
      float scale_q = p.query_scale, scale_k = 1;
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
      StoreWire8(WireType::kBF16, s.q, t * kRow + c, q);
      StoreWire8(WireType::kBF16, &key, 0, k);
      if (there && row < 0) key = *reinterpret_cast<const uint4*>(block.Row(p.layout.keys, t) + 2 * c);
      *reinterpret_cast<uint4*>(s.k + t * kRow + c) = key;
      if (!fresh || !kept || c >= p.layout.key_stride) continue;
      *reinterpret_cast<uint4*>(block.Row(p.layout.keys, t) + 2 * c) = key;
      if (p.conv_width == 0 || !there) continue;
      std::byte* const history = block.Row(p.layout.history, t);
      *reinterpret_cast<uint4*>(history + 2 * c) = raw_q;
      *reinterpret_cast<uint4*>(history + 2 * (p.key_dim + c)) = raw_k;
    }
  }

  __device__ __forceinline__ void LoadWideValues() {
    const int width = StateChunkValues(p.value_dim), vectors = width / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kTokens * vectors; i += kThreads) {
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
      }
      *reinterpret_cast<uint4*>(space.values + t * width + c) = bits;
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
    float scale_q = p.query_scale, scale_k = 1;
    if (p.normalise && fresh) {
      scale_q *= rsqrtf(WarpSum(squares_q) + 1e-6f);
      scale_k = rsqrtf(WarpSum(squares_k) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = lane + 32 * i;
      s.q[t * kRow + c] = __float2bfloat16_rn(q[i] * scale_q);
      const __nv_bfloat16 key = __float2bfloat16_rn(k[i] * scale_k);
      s.k[t * kRow + c] = key;
      if (fresh && key_row != nullptr && c < p.layout.key_stride) key_row[c] = key;
    }
    LoadGates(t, row, old, fresh);
    LoadValue(t, row, old, fresh, history);
  }

  __device__ __forceinline__ void LoadGates(int t, int row, bool old, bool fresh) {
    const float* const gates = fresh && p.gates > 0 ? GatesOf(p, item, head, row) : nullptr;
    if constexpr (kVector) {
      auto* const decays = (fresh || old) && kept
                               ? reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.decays, t))
                               : nullptr;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = lane + 32 * i;
        float log = 0;
        if (c < p.key_dim && old) log = __bfloat162float(decays[c]);
        if (c < p.key_dim && fresh) log = RoundBF16(fmaxf(gates[c], kLowestLogDecay));
        if (fresh && decays != nullptr && c < p.layout.key_stride) decays[c] = __float2bfloat16_rn(log);
        s.decay[t * kDecay + c] = log;
      }
    } else if (lane == 0) {
      auto* const decays = kept ? reinterpret_cast<float*>(block.Row(p.layout.decays, 0)) : nullptr;
      float log = 0;
      if (old) log = decays[t];
      if (fresh) log = fmaxf(p.token_decay ? gates[0] : p.log_decay[item.first_head + head], kLowestLogDecay);
      if (fresh && decays != nullptr) decays[t] = log;
      s.decay[t] = log;
    }
    if (lane != 0) return;
    float rate = old ? 1.0f : 0.0f;
    if (fresh) rate = p.token_rate ? gates[p.token_decay ? (kVector ? p.key_dim : 1) : 0] : 1.0f;
    s.rate[t] = rate;
    space.rate[t] = rate;
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
      }
      space.values[t * width + c] = __float2bfloat16_rn(v);
    }
  }

  __device__ __forceinline__ void SumDecays() {
    if constexpr (kVector) {
      for (int c = threadIdx.x; c < kKeys; c += kThreads) {
        float sum = 0;
#pragma unroll 8
        for (int t = 0; t < kTokens; ++t) {
          sum += s.decay[t * kDecay + c];
          s.decay[t * kDecay + c] = sum;
        }
        space.total[c] = __expf(sum);
      }
    } else {
      if (warp == 0) {
        float low = s.decay[lane], high = s.decay[lane + 32];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const float more_low = __shfl_up_sync(~0u, low, step), more_high = __shfl_up_sync(~0u, high, step);
          if (lane >= step) low += more_low, high += more_high;
        }
        high += __shfl_sync(~0u, low, 31);
        s.decay[lane] = low;
        s.decay[lane + 32] = high;
      }
      __syncthreads();
      for (int c = threadIdx.x; c < kKeys; c += kThreads) space.total[c] = __expf(s.decay[kTokens - 1]);
    }
  }

  __device__ __forceinline__ float Sum(int t, int c) const { return kVector ? s.decay[t * kDecay + c] : s.decay[t]; }

  __device__ __forceinline__ void StoreFaded() {
    for (int i = threadIdx.x; i < kTokens * kKeys / 8; i += kThreads) {
      const int t = i / (kKeys / 8), c = i % (kKeys / 8) * 8;
      const bool recalls = IsNew(t);  // what an old token recalled is in its u
      __align__(16) __nv_bfloat16 query[8], recall[8], keys[8];
      float from = 0, to = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (kVector || j == 0) {
          const float sum = Sum(t, c + j);
          from = __expf(sum);
          to = __expf(Sum(kTokens - 1, c + j) - sum);
        }
        const float k = __bfloat162float(s.k[t * kRow + c + j]);
        query[j] = __float2bfloat16_rn(__bfloat162float(s.q[t * kRow + c + j]) * from);
        recall[j] = __float2bfloat16_rn(recalls ? k * from : 0.0f);
        keys[j] = __float2bfloat16_rn(k * to);
      }
      *reinterpret_cast<uint4*>(space.query + t * kKeys + c) = *reinterpret_cast<const uint4*>(query);
      if (kDelta) *reinterpret_cast<uint4*>(space.recall + t * kKeys + c) = *reinterpret_cast<const uint4*>(recall);
      *reinterpret_cast<uint4*>(space.keys + t * kKeys + c) = *reinterpret_cast<const uint4*>(keys);
    }
  }

  // What a token's q and k weigh two tokens j, j + 1 with.
  __device__ __forceinline__ void StorePair(int t, int j, float q0, float q1, float k0, float k1) {
    *reinterpret_cast<__nv_bfloat162*>(space.weights + t * kTokens + j) =
        __floats2bfloat162_rn(j <= t ? q0 : 0.0f, j + 1 <= t ? q1 : 0.0f);
    if constexpr (!kDelta) return;
    const float rate = IsNew(t) ? s.rate[t] : 0.0f;
    s.system[t * kSystem + j] = j < t ? rate * k0 : 0.0f;
    s.system[t * kSystem + j + 1] = j + 1 < t ? rate * k1 : 0.0f;
  }

  // Scalar decays: a warp has 16 rows; what lies above the diagonal is not multiplied.
  __device__ __forceinline__ void Multiply() {
    const uint32_t q_at = SharedAddress(s.q), k_at = SharedAddress(s.k);
    float by_q[8][4] = {}, by_k[kDelta ? 8 : 1][4] = {};
#pragma unroll
    for (int c = 0; c < kKeys; c += 16) {
      uint32_t q[4], k[4];
      LoadA(q, q_at, kRow, 16 * warp, c);
      if constexpr (kDelta) LoadA(k, k_at, kRow, 16 * warp, c);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > warp) break;
        uint32_t b[4];
        LoadB(b, k_at, kRow, 16 * n, c);
        BF16Math::Mma(by_q[2 * n], q, b[0], b[1]);
        BF16Math::Mma(by_q[2 * n + 1], q, b[2], b[3]);
        if constexpr (kDelta) {
          BF16Math::Mma(by_k[2 * n], k, b[0], b[1]);
          BF16Math::Mma(by_k[2 * n + 1], k, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = 16 * warp + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
        const float f0 = __expf(fminf(s.decay[t] - s.decay[j], 0.0f));
        const float f1 = __expf(fminf(s.decay[t] - s.decay[j + 1], 0.0f));
        const int m = kDelta ? n : 0;
        StorePair(t, j, by_q[n][2 * half] * f0, by_q[n][2 * half + 1] * f1, by_k[m][2 * half] * f0,
                  by_k[m][2 * half + 1] * f1);
      }
    }
  }

  // Vector decays, tokens of earlier groups of 16: both sides faded to the beginning of the rows' group.
  __device__ __forceinline__ void MultiplyBefore() {
    const int first = 16 * warp;
    float by_q[6][4] = {}, by_k[6][4] = {};
    const auto pair = [&](const __nv_bfloat16* x, int t, int c, const float2& fade) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x + t * kRow + c));
      return BF16Math::Pack(v.x * fade.x, v.y * fade.y);
    };
    if (first > 0) {
#pragma unroll 1
      for (int c = 0; c < kKeys; c += 16) {
        uint32_t q[4], k[4];
        float2 at[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          at[h] = *reinterpret_cast<const float2*>(&s.decay[(first - 1) * kDecay + c + lane % 4 * 2 + 8 * h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows lane / 4 and + 8; columns 2 (lane % 4) and + 8
          const int t = first + lane / 4 + i % 2 * 8, column = c + lane % 4 * 2 + i / 2 * 8;
          const float2 sum = *reinterpret_cast<const float2*>(&s.decay[t * kDecay + column]);
          const float2 fade = {__expf(sum.x - at[i / 2].x), __expf(sum.y - at[i / 2].y)};
          q[i] = pair(s.q, t, column, fade);
          k[i] = pair(s.k, t, column, fade);
        }
#pragma unroll
        for (int n = 0; n < 6; ++n) {
          if (8 * n >= first) break;
          uint32_t b[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int j = 8 * n + lane / 4, column = c + lane % 4 * 2 + 8 * h;
            const float2 sum = *reinterpret_cast<const float2*>(&s.decay[j * kDecay + column]);
            b[h] = pair(s.k, j, column, {__expf(at[h].x - sum.x), __expf(at[h].y - sum.y)});
          }
          BF16Math::Mma(by_q[n], q, b[0], b[1]);
          BF16Math::Mma(by_k[n], k, b[0], b[1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (8 * n >= first && 8 * n < first + 16) continue;  // the diagonal's
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = n < 6 ? n : 0;
        StorePair(first + lane / 4 + 8 * half, 8 * n + lane % 4 * 2, by_q[m][2 * half], by_q[m][2 * half + 1],
                  by_k[m][2 * half], by_k[m][2 * half + 1]);
      }
    }
  }

  // Within a warp's group of 16 tokens, decay by decay: no reference would serve all pairs. A lane has some channels.
  __device__ __forceinline__ void MultiplyDiagonal() {
    const int first = 16 * warp;
    float decay[16][kOwn];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int t = first + i, c = lane * kOwn + n;
        decay[i][n] = i > 0 ? __expf(s.decay[t * kDecay + c] - s.decay[(t - 1) * kDecay + c]) : 1.0f;
      }
    }
#pragma unroll 1
    for (int j = 0; j < 16; ++j) {
      float faded[kOwn], sums[32];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) faded[n] = __bfloat162float(s.k[(first + j) * kRow + lane * kOwn + n]);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sums[i] = sums[16 + i] = 0;
        if (i < j) continue;
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          if (i > j) faded[n] *= decay[i][n];
          sums[i] += __bfloat162float(s.q[(first + i) * kRow + lane * kOwn + n]) * faded[n];
          if constexpr (kDelta) sums[16 + i] += __bfloat162float(s.k[(first + i) * kRow + lane * kOwn + n]) * faded[n];
        }
      }
      const float sum = TransposeSum(sums);  // of this lane's i, by q or by k
      const int i = lane % 16, t = first + i;
      if (lane < 16) {
        space.weights[t * kTokens + first + j] = __float2bfloat16_rn(i >= j ? sum : 0.0f);
      } else if (kDelta) {
        s.system[t * kSystem + first + j] = i > j && IsNew(t) ? s.rate[t] * sum : 0.0f;
      }
    }
  }

  // A thread a column of (1 + system)^-1 diag(rate).
  __device__ __forceinline__ void Invert() {
    const int j = threadIdx.x;
    float x[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 row = *reinterpret_cast<const float4*>(&s.system[i * kSystem + m]);
        sum[0] += row.x * x[m];
        if (m + 1 < i) sum[1] += row.y * x[m + 1];
        if (m + 2 < i) sum[2] += row.z * x[m + 2];
        if (m + 3 < i) sum[3] += row.w * x[m + 3];
      }
      x[i] = (i == j ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      space.inverse[i * kTokens + j] = __float2bfloat16_rn(x[i] * s.rate[j]);
    }
  }

  const StateLaunch& p;
  Shared& s;
  const StateItem item;
  const int head;
  const ChunkSpace<kKeys> space;
  StateBlock block;
  bool kept;      // the block is
  int first_row;  // of the item: that of the block's first token, negative with old tokens
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
};

template <int kKeys, bool kVector, bool kDelta>
__global__ void __launch_bounds__(kThreads) StateChunkPrepareKernel(const __grid_constant__ StateLaunch p) {
  using Work = Preparer<kKeys, kVector, kDelta>;
  extern __shared__ __align__(16) std::byte memory[];
  const StateUnit unit = UnitOf(p, blockIdx.x);
  const int chunk = p.chunk_begin + blockIdx.y;
  if (chunk >= ChunksOf(p.items[unit.item])) return;
  Work(p, *reinterpret_cast<typename Work::Shared*>(memory), unit, chunk).Run();
}

template <int kKeys, bool kVector, bool kDelta>
int Launch(const StateLaunch& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Preparer<kKeys, kVector, kDelta>::Shared);
  auto* const kernel = StateChunkPrepareKernel<kKeys, kVector, kDelta>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(p.unit_count, p.chunk_end - p.chunk_begin), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <int kKeys>
int LaunchFor(const StateLaunch& p, cudaStream_t stream) {
  if (p.vector_decay) return p.delta ? Launch<kKeys, true, true>(p, stream) : Launch<kKeys, true, false>(p, stream);
  return p.delta ? Launch<kKeys, false, true>(p, stream) : Launch<kKeys, false, false>(p, stream);
}

}  // namespace

int LaunchStateChunkPrepare(const StateLaunch* p, void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  return p->key_dim <= 64 ? LaunchFor<64>(*p, on) : LaunchFor<128>(*p, on);
}

}  // namespace dovetail::kernels::cuda
