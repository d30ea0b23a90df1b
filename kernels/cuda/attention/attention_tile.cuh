#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/primitives/primitives.cuh"

// What one warp keeps of one tile of rows (attention_kernel.cuh), and what it does with one KvBlock. Device code
// only.

namespace dovetail::kernels::cuda {

template <KvType kType>
struct KvTraits {
  using Math = F16Math;
  static constexpr int kElement = 2;
};
template <>
struct KvTraits<KvType::kBF16> {
  using Math = BF16Math;
  static constexpr int kElement = 2;
};
template <>
struct KvTraits<KvType::kE4M3> {
  using Math = F16Math;
  static constexpr int kElement = 1;
};

// Which token of a block stands in column n of score tile i, so that the weights of a thread are of the tokens of V
// that it loads. swaps: rows of keys lie such (CudaKvLayout) that two neighbouring columns read all banks only if their
// tokens differ by four.
template <KvType kType>
__device__ __forceinline__ constexpr int TokenOf(int i, int n, bool swaps) {
  if (kType == KvType::kE4M3) return 16 * (n / 2) + 4 * (i / 2) + 2 * (i % 2) + n % 2;
  return 8 * i + (swaps ? (n & 1) << 2 | (n & 2) | n >> 2 : n);
}

// Eight elements of a query from `dim` on as the products take them.
template <typename Math>
__device__ __forceinline__ uint4 LoadQuery(const AttentionCall& p, int64_t row_at, int dim, bool present) {
  if (!present || dim >= p.layout.key_dim) return make_uint4(0, 0, 0, 0);
  const int64_t at = row_at + dim;
  if (p.q_type == WireType::kF32) {
    const float4* q = reinterpret_cast<const float4*>(static_cast<const float*>(p.q) + at);
    const float4 a = q[0], b = q[1];
    return make_uint4(Math::Pack(a.x, a.y), Math::Pack(a.z, a.w), Math::Pack(b.x, b.y), Math::Pack(b.z, b.w));
  }
  uint4 v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.q) + at);
  const bool is_bf16 = p.q_type == WireType::kBF16;
  if (is_bf16 == (Math::kOnes == BF16Math::kOnes)) return v;
  uint32_t* words = &v.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = is_bf16 ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[i]))
                             : __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    words[i] = Math::Pack(f.x, f.y);
  }
  return v;
}

// A warp's part of one tile of rows: its queries, what it may see, and its partial.
template <KvType kType, int D, bool kFull>
struct TileState {
  using Math = typename KvTraits<kType>::Math;
  static constexpr int kElement = KvTraits<kType>::kElement;
  static constexpr int kKeyChunks = D * kElement / 64;  // per thread and key
  static constexpr int kStepsPerChunk = 16 / kElement / 4;

  // With as many dimensions as these, o alone takes half of the registers: queries are read again for each block.
  static constexpr bool kReadsQueries = D > 128;

  uint32_t q[kReadsQueries ? 1 : D / 16][4];
  int64_t query_at[2];  // of rows g and g + 8; negative: there is none
  float o[D / 8][4];
  float l[4];
  float m[2];
  int row_begin[2], row_end[2];                      // visible tokens of rows g and g + 8
  int first_begin, first_end, last_begin, last_end;  // of the first and the last row of the tile

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
    l[0] = l[1] = l[2] = l[3] = 0;
    m[0] = m[1] = -INFINITY;
  }

  __device__ __forceinline__ static void Visible(const AttentionLaunch& p, const DeviceAttentionItem& item, int row,
                                                 int& begin, int& end) {
    const int position = item.first_position + row / p.group;
    end = min(position + 1, item.token_end);
    begin = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  }

  __device__ __forceinline__ void Load(const AttentionLaunch& p, const DeviceAttentionItem& item, int head, int row0,
                                       int rows, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + min(g + 8 * half, rows - 1);
      Visible(p, item, row, row_begin[half], row_end[half]);
      query_at[half] = item.q_offset + (row / p.group) * item.q_row_step +
                       static_cast<int64_t>(head * p.group + row % p.group) * p.layout.key_dim;
      if (g + 8 * half >= rows) query_at[half] = -1;
    }
    Visible(p, item, row0, first_begin, first_end);
    Visible(p, item, row0 + rows - 1, last_begin, last_end);
    if constexpr (!kReadsQueries) {
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j)
        LoadQueryChunk(p, j, c, reinterpret_cast<uint32_t(&)[kStepsPerChunk][4]>(q[j * kStepsPerChunk]));
    }
  }

  // The queries' part of the products with chunk j of the keys.
  __device__ __forceinline__ void LoadQueryChunk(const AttentionLaunch& p, int j, int c,
                                                 uint32_t (&out)[kStepsPerChunk][4]) const {
#pragma unroll
    for (int part = 0; part < 2 / kElement; ++part) {  // 8 elements at a time
      const int dim = (c + 4 * j) * (16 / kElement) + 8 * part;
      const uint4 low = LoadQuery<Math>(p, query_at[0], dim, query_at[0] >= 0),
                  high = LoadQuery<Math>(p, query_at[1], dim, query_at[1] >= 0);
      uint32_t(&s0)[4] = out[2 * part];
      uint32_t(&s1)[4] = out[2 * part + 1];
      s0[0] = low.x, s0[1] = high.x, s0[2] = low.y, s0[3] = high.y;
      s1[0] = low.z, s1[1] = high.z, s1[2] = low.w, s1[3] = high.w;
    }
  }

  __device__ __forceinline__ void Scores(const AttentionLaunch& p, uint32_t keys, int lane, float (&s)[8][4]) {
    const int g = lane / 4, c = lane % 4;
    const int row_bytes = kFull ? D * kElement : p.layout.key_row_bytes();
    const int token = TokenOf<kType>(0, g, Swaps(p));
    const uint32_t base = keys + token * row_bytes;
    const int swizzle = kElement == 2          ? CudaKvLayout::row_swizzle(token, row_bytes)
                        : row_bytes % 128 == 0 ? (token & 1) << 2
                                               : 0;
    uint32_t read[kStepsPerChunk][4];
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      if constexpr (kReadsQueries) LoadQueryChunk(p, j, c, read);
      const auto& query =
          kReadsQueries
              ? read
              : reinterpret_cast<const uint32_t(&)[kStepsPerChunk][4]>(q[kReadsQueries ? 0 : j * kStepsPerChunk]);
      const int chunk = c + 4 * j;
      const bool there = kFull || chunk * 16 < row_bytes;
      const uint32_t at = base + (chunk ^ swizzle) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint4 k = make_uint4(0, 0, 0, 0);
        if (there) k = LoadShared16(at + (TokenOf<kType>(i, 0, false) - TokenOf<kType>(0, 0, false)) * row_bytes);
        if constexpr (kElement == 2) {
          Math::Mma(s[i], query[0], k.x, k.y);
          Math::Mma(s[i], query[1], k.z, k.w);
        } else {
          Math::Mma(s[i], query[0], WidenE4M3(k.x), WidenE4M3High(k.x));
          Math::Mma(s[i], query[1], WidenE4M3(k.y), WidenE4M3High(k.y));
          Math::Mma(s[i], query[2], WidenE4M3(k.z), WidenE4M3High(k.z));
          Math::Mma(s[i], query[3], WidenE4M3(k.w), WidenE4M3High(k.w));
        }
      }
    }
  }

  __device__ __forceinline__ static bool Swaps(const AttentionLaunch& p) {
    if (kElement == 1) return false;
    return kFull ? D * kElement % 128 == 0 : p.layout.key_row_bytes() % 128 == 0;
  }

  __device__ __forceinline__ void Mask(int token0, bool swaps, int lane, float (&s)[8][4]) const {
    const int c = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = token0 + TokenOf<kType>(i, 2 * c + e % 2, swaps);
        if (token < row_begin[e / 2] || token >= row_end[e / 2]) s[i][e] = -INFINITY;
      }
    }
  }

  // Scores become weights, packed as the A operand of the second product; o and l move to the new maximum.
  __device__ __forceinline__ void Weigh(float scale_log2, float (&s)[8][4], uint32_t (&w)[4][4]) {
    float correction[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < 8; ++i) top = fmaxf(top, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float now = fmaxf(m[half], top * scale_log2);
      shift[half] = now == -INFINITY ? 0.0f : now;
      correction[half] = Exp2(m[half] - shift[half]);
      m[half] = now;
    }
    if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        o[j][0] *= correction[0], o[j][1] *= correction[0];
        o[j][2] *= correction[1], o[j][3] *= correction[1];
      }
      l[0] *= correction[0], l[1] *= correction[0];
      l[2] *= correction[1], l[3] *= correction[1];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][e] = Exp2(fmaf(s[i][e], scale_log2, -shift[e / 2]));
      w[i / 2][2 * (i % 2)] = Math::Pack(s[i][0], s[i][1]);
      w[i / 2][2 * (i % 2) + 1] = Math::Pack(s[i][2], s[i][3]);
    }
  }

  // Keeps the halves of a pair of tokens (token, token + step) that lie below end.
  __device__ __forceinline__ static uint32_t Below(int token, int end, int step = 1) {
    return token + step < end ? ~0u : token < end ? 0xffffu : 0u;
  }

  // kTail: memory from token end_token on was never written, and may hold anything.
  template <bool kTail>
  __device__ __forceinline__ void Accumulate(const AttentionLaunch& p, uint32_t values, const uint32_t (&w)[4][4],
                                             int end_token, int lane) {
#pragma unroll
    for (int step = 0; step < 4; ++step) Math::Mma(l, w[step], Math::kOnes, Math::kOnes);
    if constexpr (kElement == 2) {
      AccumulateRows<kTail>(p, values, w, end_token, lane);
    } else {
      AccumulateChunks<kTail>(p, values, w, end_token, lane);
    }
  }

  // V by row: each lane names a row of the first 32 tokens, and of the others.
  template <bool kTail>
  __device__ __forceinline__ void AccumulateRows(const AttentionLaunch& p, uint32_t values, const uint32_t (&w)[4][4],
                                                 int end_token, int lane) {
    const int row_bytes = kFull ? D * kElement : p.layout.value_row_bytes();
    const bool swaps = Swaps(p);
    const int token = TokenOf<kType>(lane / 8, lane % 8, swaps);
    const int swizzle = CudaKvLayout::row_swizzle(token, row_bytes);
    const uint32_t row = values + token * row_bytes + (kFull ? swizzle * 16 : 0);
    const int pair = TokenOf<kType>(0, 2 * (lane % 4), swaps), step_in_pair = swaps ? 4 : 1;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if (!kFull && 16 * j >= row_bytes) continue;
      // Rows of whole multiples of 128 bytes begin on one.
      const uint32_t at = kFull ? (row ^ (j % 8 * 16)) + j / 8 * 128 : row + (j / 8 * 8 + ((j % 8) ^ swizzle)) * 16;
      uint32_t v[2][4];
      LoadMatricesTransposed(v[0], at);
      LoadMatricesTransposed(v[1], at + 32 * row_bytes);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t b0 = v[step / 2][step % 2 * 2], b1 = v[step / 2][step % 2 * 2 + 1];
        if constexpr (kTail) {
          b0 &= Below(16 * step + pair, end_token, step_in_pair);
          b1 &= Below(16 * step + 8 + pair, end_token, step_in_pair);
        }
        Math::Mma(o[j], w[step], b0, b1);
      }
    }
  }

  // V in chunks of 16 tokens.
  template <bool kTail>
  __device__ __forceinline__ void AccumulateChunks(const AttentionLaunch& p, uint32_t values, const uint32_t (&w)[4][4],
                                                   int end_token, int lane) {
    const int g = lane / 4, c = lane % 4;
    const int dims = kFull ? D : p.layout.value_dim;
    const uint32_t mine = values + (c * dims + (g ^ CudaKvLayout::chunk_swizzle(c))) * 16;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if (!kFull && 8 * j >= dims) continue;
      const uint4 a = LoadShared16(mine + 128 * j);
      const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t b0 = WidenE4M3(words[step]), b1 = WidenE4M3High(words[step]);
        if constexpr (kTail) {
          b0 &= Below(16 * c + 4 * step, end_token);
          b1 &= Below(16 * c + 4 * step + 2, end_token);
        }
        Math::Mma(o[j], w[step], b0, b1);
      }
    }
  }

  // between() is called once keys have been read, before values are.
  template <typename Between>
  __device__ __forceinline__ void Attend(const AttentionLaunch& p, uint32_t block, int token0, int lane,
                                         Between&& between) {
    if (token0 >= last_end || token0 + CudaKvLayout::kTokens <= first_begin) return between();  // for other tiles
    float s[8][4] = {};
    uint32_t w[4][4];
    Scores(p, block, lane, s);
    between();
    const bool whole = token0 >= last_begin && token0 + CudaKvLayout::kTokens <= first_end;
    if (!whole) Mask(token0, Swaps(p), lane, s);
    Weigh(p.scale_log2, s, w);
    const uint32_t values = block + (kFull ? CudaKvLayout::kTokens * D * kElement : p.layout.key_bytes());
    if (whole) {
      Accumulate<false>(p, values, w, 0, lane);
    } else {
      Accumulate<true>(p, values, w, last_end - token0, lane);
    }
  }

  // Joins another partial of the same rows: m, l of its rows g and g + 8, o by Other(j) -> float[4].
  template <typename Other>
  __device__ __forceinline__ void Join(const float (&other_m)[2], const float (&other_l)[2], Other&& other) {
    float mine[2], theirs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = fmaxf(m[half], other_m[half]), shift = now == -INFINITY ? 0.0f : now;
      mine[half] = Exp2(m[half] - shift);
      theirs[half] = Exp2(other_m[half] - shift);
      m[half] = now;
      l[2 * half] = l[2 * half] * mine[half] + other_l[half] * theirs[half];
      l[2 * half + 1] = l[2 * half];
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float x[4];
      other(j, x);
      o[j][0] = o[j][0] * mine[0] + x[0] * theirs[0], o[j][1] = o[j][1] * mine[0] + x[1] * theirs[0];
      o[j][2] = o[j][2] * mine[1] + x[2] * theirs[1], o[j][3] = o[j][3] * mine[1] + x[3] * theirs[1];
    }
  }

  // Rows of o and (m, l) at `rows_o`, `rows_ml`, `stride` floats from row to row, in shared or device memory.
  __device__ __forceinline__ void Store(float* rows_o, float* rows_ml, int stride, int rows, int dims, int lane) const {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        if (8 * j >= dims) continue;
        *reinterpret_cast<float2*>(rows_o + row * stride + 8 * j + 2 * c) =
            make_float2(o[j][2 * half], o[j][2 * half + 1]);
      }
      if (c == 0) *reinterpret_cast<float2*>(rows_ml + row * 2) = make_float2(m[half], l[2 * half]);
    }
  }

  __device__ __forceinline__ void JoinStored(const float* rows_o, const float* rows_ml, int stride, int rows, int dims,
                                             int lane) {
    const int g = lane / 4, c = lane % 4;
    float other_m[2] = {-INFINITY, -INFINITY}, other_l[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (g + 8 * half >= rows) continue;
      const float2 ml = *reinterpret_cast<const float2*>(rows_ml + (g + 8 * half) * 2);
      other_m[half] = ml.x;
      other_l[half] = ml.y;
    }
    Join(other_m, other_l, [&](int j, float(&x)[4]) {
      x[0] = x[1] = x[2] = x[3] = 0;
      if (8 * j >= dims) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (g + 8 * half >= rows) continue;
        const float2 v = *reinterpret_cast<const float2*>(rows_o + (g + 8 * half) * stride + 8 * j + 2 * c);
        x[2 * half] = v.x;
        x[2 * half + 1] = v.y;
      }
    });
  }
};

}  // namespace dovetail::kernels::cuda
