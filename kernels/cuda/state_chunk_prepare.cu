#include "kernels/cuda/state_chunk_inverse.cuh"
#include "kernels/cuda/state_chunk_parts.cuh"
#include "kernels/cuda/state_launches.h"
#include "kernels/cuda/warp_sums.cuh"

// The first kernel of the chunked form: all that does not depend on S, one thread block a chunk of 64 tokens and head.
// Tokens of the block from before the item come from it, with their u in place of v and a row of the identity in the
// delta rule's system.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 128, kTokens = kStateTokens;
constexpr float kWidestRange = 160;  // of logarithms of decays, whose halves do not overflow

template <int kKeys, bool kVector, bool kDelta>
class Preparer {
  static constexpr int kRow = kKeys + 8;    // elements from row to row of q and k
  static constexpr int kDecay = kKeys + 4;  // floats from row to row of decays
  static constexpr int kOwn = kKeys / 32;   // channels of a lane

 public:
  struct Shared {
    alignas(16) __nv_bfloat16 q[kTokens * kRow];
    alignas(16) __nv_bfloat16 k[kTokens * kRow];
    alignas(16) float decay[kVector ? kTokens * kDecay : kTokens];  // logarithms, summed from the block's beginning
    alignas(16) float system[kDelta ? kTokens * kSystem : 4];       // beta A, strictly below the diagonal
    float rate[kTokens];
  };

  __device__ Preparer(const StateLaunch& launch, Shared& shared, const StateUnit& unit, int chunk)
      : p(launch), s(shared), item(p.items[unit.item]), head(unit.head), space(p, blockIdx.x, chunk) {
    const int64_t number = item.first_position / kTokens + chunk;
    block = BlockOf(p, item, head, number);
    first_row = static_cast<int>(number * kTokens - item.first_position);
    kept = block.kept();
    if (direct) weight_scale = p.query_scale;
  }

  __device__ void Run() {
    const bool wide = p.key_dim % 8 == 0 && p.value_dim % 8 == 0;
    if (direct && !kept) {
      CopyHeads();
    } else if (wide) {
      LoadHeads();
    }
    if (threadIdx.x < kTokens) LoadRate(threadIdx.x);
    if constexpr (kVector) {
      if (threadIdx.x < kKeys) LoadVectorDecays(threadIdx.x);
    } else if (threadIdx.x < kTokens) {
      LoadScalarDecay(threadIdx.x);
    }
    if (direct && !kept) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
    } else {
      __syncthreads();
      if (wide && !(direct && kDelta)) LoadWideValues();
      for (int t = warp; !wide && t < kTokens; t += kThreads / 32) LoadToken(t);
      __syncthreads();
    }
    if constexpr (!kVector) {
      SumDecays();
      __syncthreads();
    }
    StoreFactors();
    if constexpr (kVector) {
      StoreFaded();
      MultiplyBefore();
      MultiplyDiagonal();
    } else {
      if (!direct) StoreHeads();
      Multiply();
    }
    if constexpr (!kDelta) return;
    __syncthreads();
    BlockInverse(s.system).Run();
    StoreInverse();
  }

 private:
  __device__ __forceinline__ bool IsNew(int t) const { return first_row + t >= 0 && first_row + t < item.rows; }

  // q and k as they came, of tokens of the item or of its block.
  __device__ __forceinline__ void CopyHeads() {
    constexpr int kVectors = kKeys / 8;
    const uint32_t q_at = SharedAddress(s.q), k_at = SharedAddress(s.k);
#pragma unroll 4
    for (int i = threadIdx.x; i < kTokens * kVectors; i += kThreads) {
      const int t = i / kVectors, c = i % kVectors * 8, row = first_row + t;
      const int64_t at = (static_cast<int64_t>(row) * item.heads + head) * kKeys + c;
      const std::byte* const key =
          row < 0 ? block.Row(p.layout.keys, t) + 2 * c : p.key_value + item.key_offset + 2 * at;
      CopyPayloadAsync(q_at + 2 * (t * kRow + c), IsNew(t) ? p.query + item.query_offset + 2 * at : p.query, IsNew(t));
      CopyPayloadAsync(k_at + 2 * (t * kRow + c), row < item.rows ? key : p.query, row < item.rows);
    }
  }

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
        if (!kDelta && row >= 0 && kept) {
          uint4 u;
#pragma unroll
          for (int j = 0; j < 8; ++j) v[j] *= s.rate[t];
          StoreWire8(WireType::kBF16, &u, 0, v);
          *reinterpret_cast<uint4*>(block.Row(p.layout.values, t) + 2 * c) = u;
        }
      }
      if (!direct) *reinterpret_cast<uint4*>(space.values + t * width + c) = bits;
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
      s.q[t * kRow + c] = __float2bfloat16_rn(q[i] * scale_q);
      const __nv_bfloat16 key = __float2bfloat16_rn(k[i] * scale_k);
      s.k[t * kRow + c] = key;
      if (fresh && key_row != nullptr && c < p.layout.key_stride) key_row[c] = key;
    }
    LoadValue(t, row, old, fresh, history);
  }

  __device__ __forceinline__ void LoadRate(int t) {
    float rate = first_row + t < 0 ? 1.0f : 0.0f;
    if (IsNew(t))
      rate = p.token_rate ? GatesOf(p, item, head, first_row + t)[p.token_decay ? (kVector ? p.key_dim : 1) : 0] : 1.0f;
    s.rate[t] = rate;
  }
  __device__ __forceinline__ void LoadScalarDecay(int t) {
    auto* const decays = kept ? reinterpret_cast<float*>(block.Row(p.layout.decays, 0)) : nullptr;
    const int row = first_row + t;
    float log = 0;
    if (row < 0) log = decays[t];
    if (IsNew(t))
      log = fmaxf(p.token_decay ? GatesOf(p, item, head, row)[0] : p.log_decay[item.first_head + head],
                  kLowestLogDecay);
    if (IsNew(t) && kept) decays[t] = log;
    s.decay[t] = log;
  }
  // A channel's, summed from the block's beginning.
  __device__ __forceinline__ void LoadVectorDecays(int c) {
    constexpr int kAtOnce = 16;
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < kTokens; first += kAtOnce) {
      float log[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first_row + first + i;
        log[i] = 0;
        if (c >= p.key_dim) continue;
        if (row < 0) {
          log[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(block.Row(p.layout.decays, first + i))[c]);
        } else if (row < item.rows) {
          log[i] = RoundBF16(fmaxf(GatesOf(p, item, head, row)[c], kLowestLogDecay));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (kept && IsNew(first + i) && c < p.layout.key_stride)
          reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.decays, first + i))[c] = __float2bfloat16_rn(log[i]);
        sum += log[i];
        s.decay[(first + i) * kDecay + c] = sum;
      }
    }
    space.total[c] = __expf(sum);
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
              __float2bfloat16_rn(RoundBF16(v) * s.rate[t]);
      }
      space.values[t * width + c] = __float2bfloat16_rn(v);
    }
  }

  // Scalar decays, summed from the block's beginning.
  __device__ __forceinline__ void SumDecays() {
    if (warp != 0) return;
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
  // With vector decays they are in q and k.
  __device__ __forceinline__ void StoreFactors() {
    const int t = threadIdx.x;
    if constexpr (kVector) return;
    if (t < kKeys) space.total[t] = __expf(s.decay[kTokens - 1]);
    if (t >= kTokens) return;
    const float sum = s.decay[t], from = __expf(sum);
    space.factors[kFrom * kTokens + t] = from * weight_scale;
    space.factors[kRecall * kTokens + t] = IsNew(t) ? from : 0.0f;  // what an old token recalled is in its u
    space.factors[kTo * kTokens + t] = __expf(s.decay[kTokens - 1] - sum) * (kDelta ? 1.0f : s.rate[t]);
  }
  __device__ __forceinline__ void StoreHeads() {
    for (int i = threadIdx.x; i < kTokens * kKeys / 8; i += kThreads) {
      const int t = i / (kKeys / 8), c = i % (kKeys / 8) * 8;
      *reinterpret_cast<uint4*>(space.query + t * kKeys + c) = *reinterpret_cast<const uint4*>(s.q + t * kRow + c);
      *reinterpret_cast<uint4*>(space.keys + t * kKeys + c) = *reinterpret_cast<const uint4*>(s.k + t * kRow + c);
    }
  }

  __device__ __forceinline__ float Sum(int t, int c) const { return s.decay[t * kDecay + c]; }

  __device__ __forceinline__ void StoreFaded() {
    for (int i = threadIdx.x; i < kTokens * kKeys / 8; i += kThreads) {
      const int t = i / (kKeys / 8), c = i % (kKeys / 8) * 8;
      const bool recalls = IsNew(t);  // what an old token recalled is in its u
      const float rate = kDelta ? 1.0f : s.rate[t];
      __align__(16) __nv_bfloat16 query[8], recall[8], keys[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float sum = Sum(t, c + j), from = __expf(sum), to = __expf(Sum(kTokens - 1, c + j) - sum);
        const float k = __bfloat162float(s.k[t * kRow + c + j]);
        query[j] = __float2bfloat16_rn(__bfloat162float(s.q[t * kRow + c + j]) * from);
        recall[j] = __float2bfloat16_rn(recalls ? k * from : 0.0f);
        keys[j] = __float2bfloat16_rn(k * to * rate);
      }
      *reinterpret_cast<uint4*>(space.query + t * kKeys + c) = *reinterpret_cast<const uint4*>(query);
      if (kDelta) *reinterpret_cast<uint4*>(space.recall + t * kKeys + c) = *reinterpret_cast<const uint4*>(recall);
      *reinterpret_cast<uint4*>(space.keys + t * kKeys + c) = *reinterpret_cast<const uint4*>(keys);
    }
  }

  // What a token's q and k weigh two tokens j, j + 1 with.
  __device__ __forceinline__ void StorePair(int t, int j, float q0, float q1, float k0, float k1) {
    const float w0 = weight_scale * (kDelta ? 1.0f : s.rate[j]), w1 = weight_scale * (kDelta ? 1.0f : s.rate[j + 1]);
    *reinterpret_cast<__nv_bfloat162*>(space.weights + t * kTokens + j) =
        __floats2bfloat162_rn(j <= t ? w0 * q0 : 0.0f, j + 1 <= t ? w1 * q1 : 0.0f);
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
      if (n > 2 * warp + 1) break;
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
      if (8 * n >= first) break;  // the diagonal's, and what is not read
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = n < 6 ? n : 0;
        StorePair(first + lane / 4 + 8 * half, 8 * n + lane % 4 * 2, by_q[m][2 * half], by_q[m][2 * half + 1],
                  by_k[m][2 * half], by_k[m][2 * half + 1]);
      }
    }
  }

  // Within a warp's group of 16 tokens: both sides faded to the middle of their decays, unless that would overflow.
  __device__ __forceinline__ void MultiplyDiagonal() {
    const int first = 16 * warp;
    bool narrow = true;
#pragma unroll
    for (int n = 0; n < kOwn; ++n)
      narrow = narrow && Sum(first, lane + 32 * n) - Sum(first + 15, lane + 32 * n) <= kWidestRange;
    if (!__all_sync(~0u, narrow)) return MultiplyDiagonalOneByOne();
    float by_q[2][4] = {}, by_k[2][4] = {};
    const auto pair = [&](const __nv_bfloat16* x, int t, int c, const float2& fade) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x + t * kRow + c));
      return BF16Math::Pack(v.x * fade.x, v.y * fade.y);
    };
    const auto sums = [&](int t, int c) { return *reinterpret_cast<const float2*>(&s.decay[t * kDecay + c]); };
#pragma unroll 1
    for (int c = 0; c < kKeys; c += 16) {
      uint32_t q[4], k[4], b[2][2];
      float2 middle[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = sums(first, c + lane % 4 * 2 + 8 * h), y = sums(first + 15, c + lane % 4 * 2 + 8 * h);
        middle[h] = {0.5f * (x.x + y.x), 0.5f * (x.y + y.y)};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows lane / 4 and + 8; columns 2 (lane % 4) and + 8
        const int t = first + lane / 4 + i % 2 * 8, column = c + lane % 4 * 2 + i / 2 * 8;
        const float2 sum = sums(t, column);
        const float2 up = {__expf(middle[i / 2].x - sum.x), __expf(middle[i / 2].y - sum.y)};
        const float2 down = {__expf(sum.x - middle[i / 2].x), __expf(sum.y - middle[i / 2].y)};
        q[i] = pair(s.q, t, column, down);
        k[i] = pair(s.k, t, column, down);
        b[i % 2][i / 2] = pair(s.k, t, column, up);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        BF16Math::Mma(by_q[n], q, b[n][0], b[n][1]);
        if constexpr (kDelta) BF16Math::Mma(by_k[n], k, b[n][0], b[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        StorePair(first + lane / 4 + 8 * half, first + 8 * n + lane % 4 * 2, by_q[n][2 * half], by_q[n][2 * half + 1],
                  by_k[n][2 * half], by_k[n][2 * half + 1]);
  }

  // The same decay by decay: no reference would serve all pairs. A lane has some channels.
  __device__ __forceinline__ void MultiplyDiagonalOneByOne() {
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
        const float weight = kDelta ? 1.0f : s.rate[first + j];
        space.weights[t * kTokens + first + j] = __float2bfloat16_rn(i >= j ? weight * sum : 0.0f);
      } else if (kDelta) {
        s.system[t * kSystem + first + j] = i > j && IsNew(t) ? s.rate[t] * sum : 0.0f;
      }
    }
  }

  // (1 + system)^-1 diag(rate), but for blocks above the diagonal, which nobody reads.
  __device__ __forceinline__ void StoreInverse() {
    const BlockInverse inverse(s.system);
    for (int i = threadIdx.x; i < kTokens * kTokens / 8; i += kThreads) {
      const int row = i / (kTokens / 8), column = i % (kTokens / 8) * 8;
      if (column / 16 > row / 16) continue;
      const float* const from = inverse.Row(row, column);
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = from[j] * s.rate[column + j];
      StoreWire8(WireType::kBF16, space.inverse, row * kTokens + column, x);
    }
  }

  const StateLaunch& p;
  Shared& s;
  const StateItem item;
  const int head;
  const ChunkSpace<kKeys> space;
  StateBlock block;
  const bool direct = StateChunksAreDirect(p);
  float weight_scale = 1;  // of q, if it is used as it came
  bool kept;               // the block is
  int first_row;           // of the item: that of the block's first token, negative with old tokens
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
