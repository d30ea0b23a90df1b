#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/state/state_chunk_inputs.cuh"
#include "kernels/cuda/state/state_chunk_inverse.cuh"
#include "kernels/cuda/state/state_launches.h"

// The first kernel of the chunked form for decays of channels: all that does not depend on S, one thread block a chunk
// of 64 tokens and head. Tokens are in four groups of 16. A thread has two channels of a group, and fades each q and k
// of them twice: forward from the group's first token (e^(g - g_first), at most 1) and k back to it (e^(g_first - g)).
// What else is needed differs from these by a factor of the channel: k as a later group sees it, q and k as S sees
// them. Products are then those of plain matrices.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kGroups = 4, kGroup = kStateTokens / kGroups;
constexpr int kPairs = kGroups * (kGroups + 1) / 2;  // of groups, the later first
__device__ __forceinline__ constexpr int PairOf(int later, int group) { return later * (later + 1) / 2 + group; }

// Ranges of logarithms (base 2) of decays within a group: whose inverse does not overflow; whose halves do not.
constexpr float kNarrowRange = 110, kWidestRange = 230;

template <int kKeys, bool kDelta>
class VectorPreparer : ChunkInputs<kKeys, true, kDelta, 2 * kKeys> {
  static constexpr int kCount = 2 * kKeys;  // threads
  using Base = ChunkInputs<kKeys, true, kDelta, kCount>;
  using Base::p, Base::in, Base::item, Base::head, Base::space, Base::block, Base::first_row, Base::kept, Base::lane,
      Base::warp, Base::kTokens, Base::kRow, Base::kOwn;
  static constexpr int kDecay = kKeys + 4;  // floats from row to row of decays

 public:
  struct Shared {
    ChunkRows<kKeys> rows;  // as they came; then faded forward
    union {
      alignas(16) __nv_bfloat16 back[kPairs * kGroup * kRow];  // k of a group as a later one (or itself) sees it
      alignas(16) float decay[kTokens * kDecay];               // of wide ranges: logarithms, summed
    };
    alignas(16) float system[kDelta ? kTokens * kSystem : 4];
    alignas(16) float first[kGroups * kKeys], last[kGroups * kKeys];  // sums of a group: of one token, of all
  };
  static constexpr int kThreads = kCount, kTogether = 2;

  __device__ VectorPreparer(const StateLaunch& launch, Shared& shared, const StateUnit& unit, int chunk)
      : Base(launch, shared.rows, unit, chunk), s(shared) {}

  __device__ void Run() {
    const bool wide = p.key_dim % 8 == 0 && p.value_dim % 8 == 0;
    const bool copies =
        wide && !kept && p.key_dim == kKeys && p.wire == WireType::kBF16 && p.conv_width == 0 && !p.normalise;
    if (copies) {
      this->CopyHeads();
      scale = p.query_scale;
    } else if (wide) {
      this->LoadHeads();
    }
    if (threadIdx.x < kTokens) this->LoadRate(threadIdx.x);
    float2 sums[kGroup];
    LoadDecays(sums);
    SumDecays(sums);
    if (copies) asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (!copies) {
      if (wide) this->LoadWideValues();
      for (int t = warp; !wide && t < kTokens; t += kCount / 32) this->LoadToken(t);
    }
    const bool narrow = fmaxf(sums[0].x - sums[kGroup - 1].x, sums[0].y - sums[kGroup - 1].y) <= kNarrowRange;
    if (__syncthreads_and(narrow)) {
      Fade(sums);
      __syncthreads();
      Multiply();
    } else {
      KeepDecays(sums);
      __syncthreads();
      StoreFaded();
      pair_scale = scale;
      if (warp < kGroups) {
        MultiplyBefore();
        MultiplyDiagonal();
      }
    }
    if constexpr (!kDelta) return;
    __syncthreads();
    BlockInverse inverse(s.system);
    inverse.Run();
    inverse.Store<kCount>(in.rate, space.inverse);
  }

 private:
  __device__ __forceinline__ float2 At(const float* sums, int of) const {
    return *reinterpret_cast<const float2*>(sums + of * kKeys + channel);
  }

  // Logarithms, base 2.
  __device__ __forceinline__ void LoadDecays(float2 (&logs)[kGroup]) const {
    const int first = kGroup * group;
    const bool low = channel < p.key_dim, high = channel + 1 < p.key_dim;
    if (!kept && first_row + first >= 0 && first_row + first + kGroup <= item.rows) {
      const float* at = GatesOf(p, item, head, first_row + first) + channel;
      const int64_t step = static_cast<int64_t>(item.heads) * p.gates;
#pragma unroll
      for (int i = 0; i < kGroup; ++i, at += step) logs[i] = {low ? at[0] : 0.0f, high ? at[1] : 0.0f};
#pragma unroll
      for (int i = 0; i < kGroup; ++i) logs[i] = {Rounded(logs[i].x), Rounded(logs[i].y)};
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int row = first_row + first + i;
      float2 log = {0, 0};
      if (row < 0 && low) {
        log = __bfloat1622float2(
            *reinterpret_cast<const __nv_bfloat162*>(block.Row(p.layout.decays, first + i) + 2 * channel));
      } else if (row >= 0 && row < item.rows) {
        const float* const at = GatesOf(p, item, head, row) + channel;
        log = {low ? Rounded(at[0]) : 0.0f, high ? Rounded(at[1]) : 0.0f};
        if (kept && channel < p.layout.key_stride)
          *reinterpret_cast<__nv_bfloat162*>(block.Row(p.layout.decays, first + i) + 2 * channel) =
              __floats2bfloat162_rn(log.x, log.y);
      }
      logs[i] = log;
    }
  }
  __device__ __forceinline__ static float Rounded(float log) { return RoundBF16(fmaxf(log, kLowestLogDecay)); }

  // Sums of the group's tokens, in base 2, from its beginning.
  __device__ __forceinline__ void SumDecays(float2 (&sums)[kGroup]) const {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      sum.x += kLog2E * sums[i].x, sum.y += kLog2E * sums[i].y;
      sums[i] = sum;
    }
    *reinterpret_cast<float2*>(s.first + group * kKeys + channel) = sums[0];
    *reinterpret_cast<float2*>(s.last + group * kKeys + channel) = sum;
  }
  // Of all tokens before the group, or before another.
  __device__ __forceinline__ float2 Before(int of) const {
    float2 sum = {0, 0};
    for (int i = 0; i < of; ++i) {
      const float2 x = At(s.last, i);
      sum.x += x.x, sum.y += x.y;
    }
    return sum;
  }
  __device__ __forceinline__ static float2 Exp2Of(float x, float y) { return {Exp2(x), Exp2(y)}; }
  __device__ __forceinline__ static float2 Times(const float2& x, const float2& y) { return {x.x * y.x, x.y * y.y}; }
  __device__ __forceinline__ static void StoreTwo(__nv_bfloat16* to, const float2& x) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x.x, x.y);
  }

  __device__ __forceinline__ void Fade(const float2 (&sums)[kGroup]) {
    const float2 base = Before(group), first = sums[0], last = sums[kGroup - 1];
    const float2 end = {base.x + last.x, base.y + last.y};  // of the group, from the chunk's beginning
    float2 total = end, later[kGroups - 1] = {};
#pragma unroll
    for (int i = 1; i < kGroups; ++i) {
      if (group + i >= kGroups) break;
      const float2 of_first = At(s.first, group + i), of_all = At(s.last, group + i);
      later[i - 1] = Exp2Of(total.x - end.x + of_first.x, total.y - end.y + of_first.y);
      total.x += of_all.x, total.y += of_all.y;
    }
    if (group == 0) *reinterpret_cast<float2*>(space.total + channel) = Exp2Of(total.x, total.y);
    const float2 from = Exp2Of(base.x + first.x, base.y + first.y);    // the chunk's beginning to the first token
    const float2 across = Exp2Of(last.x - first.x, last.y - first.y);  // that to the group's end
    const float2 to = Exp2Of(total.x - end.x, total.y - end.y);        // that to the chunk's
    const int t0 = kGroup * group;
    __nv_bfloat16* const query = space.query + t0 * kKeys + channel;
    __nv_bfloat16* const recall = space.recall + t0 * kKeys + channel;
    __nv_bfloat16* const keys = space.keys + t0 * kKeys + channel;
    __nv_bfloat16* const q_row = in.q + t0 * kRow + channel;
    __nv_bfloat16* const k_row = in.k + t0 * kRow + channel;
    __nv_bfloat16* const back = s.back + channel;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float2 down = Exp2Of(sums[i].x - first.x, sums[i].y - first.y);
      const float2 up = Exp2Of(first.x - sums[i].x, first.y - sums[i].y);
      const float2 k = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(k_row + i * kRow));
      float2 q = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(q_row + i * kRow));
      q = Times(q, {scale * down.x, scale * down.y});
      StoreTwo(q_row + i * kRow, q);
      StoreTwo(query + i * kKeys, Times(q, from));
      if constexpr (kDelta) {
        const float2 recalled = Times(k, down);
        StoreTwo(k_row + i * kRow, recalled);
        // What an old token recalled is in its u.
        StoreTwo(recall + i * kKeys, this->IsNew(t0 + i) ? Times(recalled, from) : make_float2(0, 0));
      }
      float2 faded = Times(k, up);
      StoreTwo(back + (PairOf(group, group) * kGroup + i) * kRow, faded);
      faded = Times(faded, across);
#pragma unroll
      for (int j = 1; j < kGroups; ++j)
        if (group + j < kGroups)
          StoreTwo(back + (PairOf(group + j, group) * kGroup + i) * kRow, Times(faded, later[j - 1]));
      const float rate = kDelta ? 1.0f : in.rate[t0 + i];
      StoreTwo(keys + i * kKeys, Times(faded, {to.x * rate, to.y * rate}));
    }
  }

  // A warp has a group's rows, by q or by k.
  __device__ __forceinline__ void Multiply() {
    for (int task = warp; task < (kDelta ? 2 : 1) * kGroups; task += kCount / 32) {
      const int later = task % kGroups;
      const bool by_k = task >= kGroups;
      const uint32_t a_at = SharedAddress(by_k ? in.k : in.q);
      const uint32_t b_at = SharedAddress(s.back + PairOf(later, 0) * kGroup * kRow);
      float sums[2 * kGroups][4] = {};
#pragma unroll 2
      for (int c = 0; c < kKeys; c += 16) {
        uint32_t a[4];
        LoadA(a, a_at, kRow, kGroup * later, c);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          if (n > later) break;
          uint32_t b[4];
          LoadB(b, b_at, kRow, kGroup * n, c);
          BF16Math::Mma(sums[2 * n], a, b[0], b[1]);
          BF16Math::Mma(sums[2 * n + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2 * kGroups; ++n) {
        if (n > 2 * later + 1) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = kGroup * later + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
          if (by_k) {
            StoreSystem(t, j, sums[n][2 * half], sums[n][2 * half + 1]);
          } else {
            StoreWeights(t, j, sums[n][2 * half], sums[n][2 * half + 1]);
          }
        }
      }
    }
  }
  // What a token's q weighs two tokens j, j + 1 with; what its k finds of them.
  __device__ __forceinline__ void StoreWeights(int t, int j, float x, float y) const {
    const float rate0 = pair_scale * (kDelta ? 1.0f : in.rate[j]);
    const float rate1 = pair_scale * (kDelta ? 1.0f : in.rate[j + 1]);
    *reinterpret_cast<__nv_bfloat162*>(space.weights + t * kTokens + j) =
        __floats2bfloat162_rn(j <= t ? rate0 * x : 0.0f, j + 1 <= t ? rate1 * y : 0.0f);
  }
  __device__ __forceinline__ void StoreSystem(int t, int j, float x, float y) {
    const float rate = this->IsNew(t) ? in.rate[t] : 0.0f;
    *reinterpret_cast<float2*>(s.system + t * kSystem + j) =
        make_float2(j < t ? rate * x : 0.0f, j + 1 < t ? rate * y : 0.0f);
  }
  __device__ __forceinline__ void StorePair(int t, int j, float q0, float q1, float k0, float k1) {
    StoreWeights(t, j, q0, q1);
    if constexpr (kDelta) StoreSystem(t, j, k0, k1);
  }

  // From here on: groups whose decays have wide ranges.
  __device__ __forceinline__ void KeepDecays(const float2 (&sums)[kGroup]) {
    const float2 base = Before(group);
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      *reinterpret_cast<float2*>(s.decay + (kGroup * group + i) * kDecay + channel) =
          make_float2(base.x + sums[i].x, base.y + sums[i].y);
    if (group == kGroups - 1)
      *reinterpret_cast<float2*>(space.total + channel) =
          Exp2Of(base.x + sums[kGroup - 1].x, base.y + sums[kGroup - 1].y);
  }
  __device__ __forceinline__ float Sum(int t, int c) const { return s.decay[t * kDecay + c]; }

  __device__ __forceinline__ void StoreFaded() {
    for (int i = threadIdx.x; i < kTokens * kKeys / 8; i += kCount) {
      const int t = i / (kKeys / 8), c = i % (kKeys / 8) * 8;
      const bool recalls = this->IsNew(t);  // what an old token recalled is in its u
      const float rate = kDelta ? 1.0f : in.rate[t];
      __align__(16) __nv_bfloat16 query[8], recall[8], keys[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float sum = Sum(t, c + j), from = Exp2(sum), to = Exp2(Sum(kTokens - 1, c + j) - sum);
        const float k = __bfloat162float(in.k[t * kRow + c + j]);
        query[j] = __float2bfloat16_rn(__bfloat162float(in.q[t * kRow + c + j]) * (scale * from));
        recall[j] = __float2bfloat16_rn(recalls ? k * from : 0.0f);
        keys[j] = __float2bfloat16_rn(k * to * rate);
      }
      *reinterpret_cast<uint4*>(space.query + t * kKeys + c) = *reinterpret_cast<const uint4*>(query);
      if (kDelta) *reinterpret_cast<uint4*>(space.recall + t * kKeys + c) = *reinterpret_cast<const uint4*>(recall);
      *reinterpret_cast<uint4*>(space.keys + t * kKeys + c) = *reinterpret_cast<const uint4*>(keys);
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
          const float2 fade = {Exp2(sum.x - at[i / 2].x), Exp2(sum.y - at[i / 2].y)};
          q[i] = pair(in.q, t, column, fade);
          k[i] = pair(in.k, t, column, fade);
        }
#pragma unroll
        for (int n = 0; n < 6; ++n) {
          if (8 * n >= first) break;
          uint32_t b[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int j = 8 * n + lane / 4, column = c + lane % 4 * 2 + 8 * h;
            const float2 sum = *reinterpret_cast<const float2*>(&s.decay[j * kDecay + column]);
            b[h] = pair(in.k, j, column, {Exp2(at[h].x - sum.x), Exp2(at[h].y - sum.y)});
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
        const float2 up = {Exp2(middle[i / 2].x - sum.x), Exp2(middle[i / 2].y - sum.y)};
        const float2 down = {Exp2(sum.x - middle[i / 2].x), Exp2(sum.y - middle[i / 2].y)};
        q[i] = pair(in.q, t, column, down);
        k[i] = pair(in.k, t, column, down);
        b[i % 2][i / 2] = pair(in.k, t, column, up);
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
        decay[i][n] = i > 0 ? Exp2(s.decay[t * kDecay + c] - s.decay[(t - 1) * kDecay + c]) : 1.0f;
      }
    }
#pragma unroll 1
    for (int j = 0; j < 16; ++j) {
      float faded[kOwn], sums[32];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) faded[n] = __bfloat162float(in.k[(first + j) * kRow + lane * kOwn + n]);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sums[i] = sums[16 + i] = 0;
        if (i < j) continue;
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          if (i > j) faded[n] *= decay[i][n];
          sums[i] += __bfloat162float(in.q[(first + i) * kRow + lane * kOwn + n]) * faded[n];
          if constexpr (kDelta) sums[16 + i] += __bfloat162float(in.k[(first + i) * kRow + lane * kOwn + n]) * faded[n];
        }
      }
      const float sum = TransposeSum(sums);  // of this lane's i, by q or by k
      const int i = lane % 16, t = first + i;
      if (lane < 16) {
        const float weight = kDelta ? 1.0f : in.rate[first + j];
        space.weights[t * kTokens + first + j] = __float2bfloat16_rn(i >= j ? weight * sum : 0.0f);
      } else if (kDelta) {
        s.system[t * kSystem + first + j] = i > j && this->IsNew(t) ? in.rate[t] * sum : 0.0f;
      }
    }
  }

  Shared& s;
  const int group = threadIdx.x / (kKeys / 2), channel = threadIdx.x % (kKeys / 2) * 2;  // and the next one
  float scale = 1;                                                                       // of q, if it lies as it came
  float pair_scale = 1;                                                                  // of q's products
};

}  // namespace

int LaunchStateChunkPrepareVector(const StateLaunch* p, void* stream) {
  return LaunchStatePrepareFor<VectorPreparer>(*p, stream);
}

}  // namespace dovetail::kernels::cuda
