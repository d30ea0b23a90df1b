#pragma once
#include <climits>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/attention_output.cuh"
#include "kernels/cuda/primitives.cuh"

// Attention over paged KV (paged_attention.h says what is computed). One persistent thread block a multiprocessor takes an equal,
// contiguous range of all KV blocks, whatever sequences and heads they belong to. One warp copies whole KvBlocks into a ring of
// shared memory; eight warps attend, each to blocks of its own, with its own (o, m, l); where a thread block's range of one
// (sequence, head) ends, they hand these on from warp to warp and the last writes the result, or a piece of it if other thread
// blocks hold the rest: the last to arrive joins the pieces in the order of the tokens. So bits do not depend on timing.
//
// The rows of a tile are the query heads of a KV head, times q_rows. Products run on the tensor cores (16 rows x 64 tokens), sums
// and softmax in f32; weights are rounded to the type of the products, their sum is that of the rounded ones.

namespace dovetail::kernels::cuda {

// Two warp groups attend; of the third, one warp copies, and the rest give their registers to the others.
inline constexpr int kThreads = (kConsumerWarps + 4) * 32;

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

// Which token of a block stands in column n of score tile i, so that the weights of a thread are of the tokens of the V chunks that
// it loads.
template <KvType kType>
__device__ __forceinline__ constexpr int TokenOf(int i, int n) {
  return kType == KvType::kE4M3 ? 16 * (n / 2) + 4 * (i / 2) + 2 * (i % 2) + n % 2
                                : 8 * (n / 2) + 32 * (i / 4) + 4 * (i / 2 % 2) + 2 * (i % 2) + n % 2;
}

struct SharedPlan {
  uint32_t ring;      // [stages][block bytes]
  uint32_t full;      // [stages] barriers
  uint32_t empty;     // [stages]
  uint32_t chain;     // [warps]
  float* handover_o;  // [tiles][16][stride]
  float* handover_ml;  // [tiles][16][2]
};

template <int D>
__host__ __device__ constexpr int HandoverStride() {
  return D + 8;  // rows fall on different banks
}

inline constexpr int kMaxStages = 24;

template <int D>
__host__ __device__ constexpr int FixedSharedBytes(int tiles) {
  const int buffers = tiles == kConsumerWarps ? 0 : tiles;
  return buffers * kTileRows * (HandoverStride<D>() + 2) * 4 + (2 * kMaxStages + kConsumerWarps) * 8 + 128;
}

// Where the blocks of this thread block's range are: walks spans, heads and segments.
struct Cursor {
  const AttentionSpan* span;

  __device__ __forceinline__ void MoveTo(int block) {
    while (span[1].block_begin <= block) ++span;
  }
};

__device__ __forceinline__ const std::byte* BlockAddress(const AttentionLaunch& p, Cursor cursor, int block) {
  cursor.MoveTo(block);
  const AttentionSpan span = *cursor.span;
  if (span.sees_nothing) return nullptr;
  const DeviceAttentionItem& item = p.items[span.item];
  const int at = block - span.block_begin, head = at / span.segments;
  const int segment = span.first_segment + at % span.segments;
  return item.blocks[head * item.head_step + (segment - item.first_segment)] + p.kv_offset;
}

// One warp: brings block after block.
__device__ __forceinline__ void Produce(const AttentionLaunch& p, const SharedPlan& shared, int begin, int end, int lane) {
  const int bytes = p.layout.bytes();
  Cursor cursor{p.spans + p.first_span[blockIdx.x]};
  int stage = 0;
  uint32_t parity = 1;
  const std::byte* next = begin + lane < end ? BlockAddress(p, cursor, begin + lane) : nullptr;
  for (int base = begin; base < end; base += 32) {
    const std::byte* mine = next;
    cursor.MoveTo(base);
    if (base + 32 + lane < end) next = BlockAddress(p, cursor, base + 32 + lane);
    const int count = min(32, end - base);
    for (int i = 0; i < count; ++i) {
      const uint32_t full = shared.full + stage * 8, to = shared.ring + stage * bytes;
#if __CUDA_ARCH__ >= 900
      if (lane == i) {
        BarrierWait(shared.empty + stage * 8, parity);
        if (mine != nullptr) {
          BarrierArriveExpect(full, bytes);
          BulkCopy(to, mine, bytes, full);
        } else {
          BarrierArrive(full);
        }
      }
      __syncwarp();
#else
      BarrierWait(shared.empty + stage * 8, parity);
      __syncwarp();
      const auto from = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), i));
      if (from != nullptr) {
        for (int at = lane * 16; at < bytes; at += 512) ChunkCopy(to + at, from + at);
      }
      BarrierArriveAfterCopies(full);
#endif
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Eight elements of a query from `dim` on as the products take them.
template <typename Math>
__device__ __forceinline__ uint4 LoadQuery(const AttentionLaunch& p, int64_t row_at, int dim, bool present) {
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

  uint32_t q[D / 16][4];
  float o[D / 8][4];
  float l[4];
  float m[2];
  int row_begin[2], row_end[2];  // visible tokens of rows g and g + 8
  int first_begin, first_end, last_begin, last_end;  // of the first and the last row of the tile

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
    l[0] = l[1] = l[2] = l[3] = 0;
    m[0] = m[1] = -INFINITY;
  }

  __device__ __forceinline__ static void Visible(const AttentionLaunch& p, const DeviceAttentionItem& item, int row, int& begin,
                                                 int& end) {
    const int position = item.first_position + row / p.group;
    end = min(position + 1, item.token_end);
    begin = p.window > 0 ? max(position - p.window + 1, 0) : 0;
  }

  __device__ __forceinline__ void Load(const AttentionLaunch& p, const DeviceAttentionItem& item, int head, int row0, int rows,
                                       int lane) {
    const int g = lane / 4, c = lane % 4;
    int64_t at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + min(g + 8 * half, rows - 1);
      Visible(p, item, row, row_begin[half], row_end[half]);
      at[half] = item.q_offset + (row / p.group) * item.q_row_step +
                 static_cast<int64_t>(head * p.group + row % p.group) * p.layout.key_dim;
    }
    Visible(p, item, row0, first_begin, first_end);
    Visible(p, item, row0 + rows - 1, last_begin, last_end);
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
#pragma unroll
      for (int part = 0; part < 2 / kElement; ++part) {  // 8 elements at a time
        const int dim = (c + 4 * j) * (16 / kElement) + 8 * part;
        const uint4 low = LoadQuery<Math>(p, at[0], dim, g < rows), high = LoadQuery<Math>(p, at[1], dim, g + 8 < rows);
        uint32_t(&s0)[4] = q[j * kStepsPerChunk + 2 * part];
        uint32_t(&s1)[4] = q[j * kStepsPerChunk + 2 * part + 1];
        s0[0] = low.x, s0[1] = high.x, s0[2] = low.y, s0[3] = high.y;
        s1[0] = low.z, s1[1] = high.z, s1[2] = low.w, s1[3] = high.w;
      }
    }
  }

  __device__ __forceinline__ void Scores(const AttentionLaunch& p, uint32_t keys, int lane, float (&s)[8][4]) {
    const int g = lane / 4, c = lane % 4;
    const int row_bytes = kFull ? D * kElement : p.layout.key_row_bytes();
    const uint32_t base = keys + TokenOf<kType>(0, g) * row_bytes;
    const int swizzle = row_bytes % 128 == 0 ? (g & 1) << 2 : 0;
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) {
      const int chunk = c + 4 * j;
      const bool there = kFull || chunk * 16 < row_bytes;
      const uint32_t at = base + (chunk ^ swizzle) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint4 k = make_uint4(0, 0, 0, 0);
        if (there) k = LoadShared16(at + (TokenOf<kType>(i, 0) - TokenOf<kType>(0, 0)) * row_bytes);
        if constexpr (kElement == 2) {
          Math::Mma(s[i], q[2 * j], k.x, k.y);
          Math::Mma(s[i], q[2 * j + 1], k.z, k.w);
        } else {
          Math::Mma(s[i], q[4 * j], WidenE4M3(k.x), WidenE4M3High(k.x));
          Math::Mma(s[i], q[4 * j + 1], WidenE4M3(k.y), WidenE4M3High(k.y));
          Math::Mma(s[i], q[4 * j + 2], WidenE4M3(k.z), WidenE4M3High(k.z));
          Math::Mma(s[i], q[4 * j + 3], WidenE4M3(k.w), WidenE4M3High(k.w));
        }
      }
    }
  }

  __device__ __forceinline__ void Mask(int token0, int lane, float (&s)[8][4]) const {
    const int c = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = token0 + TokenOf<kType>(i, 2 * c + e % 2);
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

  // Keeps the halves of a pair of tokens (token, token + 1) that lie below end.
  __device__ __forceinline__ static uint32_t Below(int token, int end) {
    return token + 1 < end ? ~0u : token < end ? 0xffffu : 0u;
  }

  // kTail: memory from token end_token on was never written, and may hold anything.
  template <bool kTail>
  __device__ __forceinline__ void Accumulate(const AttentionLaunch& p, uint32_t values, const uint32_t (&w)[4][4], int end_token,
                                             int lane) {
    const int g = lane / 4, c = lane % 4;
    const int tiles = kFull ? D / 8 : p.layout.value_dim / 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) Math::Mma(l, w[step], Math::kOnes, Math::kOnes);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if (kFull || j < tiles) {
        if constexpr (kElement == 2) {
          const uint32_t row = values + (8 * j + g) * 128;
          uint4 a = LoadShared16(row + (c ^ (g & 1) << 2) * 16), b = LoadShared16(row + ((c ^ (g & 1) << 2) ^ 4) * 16);
          if constexpr (kTail) {
            a.x &= Below(8 * c, end_token), a.y &= Below(8 * c + 2, end_token);
            a.z &= Below(8 * c + 4, end_token), a.w &= Below(8 * c + 6, end_token);
            b.x &= Below(8 * c + 32, end_token), b.y &= Below(8 * c + 34, end_token);
            b.z &= Below(8 * c + 36, end_token), b.w &= Below(8 * c + 38, end_token);
          }
          Math::Mma(o[j], w[0], a.x, a.y);
          Math::Mma(o[j], w[1], a.z, a.w);
          Math::Mma(o[j], w[2], b.x, b.y);
          Math::Mma(o[j], w[3], b.z, b.w);
        } else {
          const uint4 a = LoadShared16(values + (8 * j + g) * 64 + c * 16);
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
    }
  }

  __device__ __forceinline__ void Attend(const AttentionLaunch& p, uint32_t block, int token0, int lane) {
    if (token0 >= last_end || token0 + CudaKvLayout::kTokens <= first_begin) return;  // for other tiles
    float s[8][4] = {};
    uint32_t w[4][4];
    Scores(p, block, lane, s);
    const bool whole = token0 >= last_begin && token0 + CudaKvLayout::kTokens <= first_end;
    if (!whole) Mask(token0, lane, s);
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
        *reinterpret_cast<float2*>(rows_o + row * stride + 8 * j + 2 * c) = make_float2(o[j][2 * half], o[j][2 * half + 1]);
      }
      if (c == 0) *reinterpret_cast<float2*>(rows_ml + row * 2) = make_float2(m[half], l[2 * half]);
    }
  }

  __device__ __forceinline__ void JoinStored(const float* rows_o, const float* rows_ml, int stride, int rows, int dims, int lane) {
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

// The rows of one unit (span and KV head) that a warp works on.
struct TileRows {
  int head = 0;
  int row0 = 0;  // among q_rows * group
  int rows = 0;  // 0: none
};

template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void WriteResult(const AttentionLaunch& p, const DeviceAttentionItem& item, const TileRows& tile,
                                            const TileState<kType, D, kFull>& state, int lane) {
  const int g = lane / 4, c = lane % 4, dims = p.layout.value_dim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (g + 8 * half >= tile.rows) continue;
    const RowResult row = ResultOf(p, item, tile.head, tile.row0 + g + 8 * half, state.m[half], state.l[2 * half]);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if (8 * j >= dims) continue;
      row.StorePair(p, 8 * j + 2 * c, state.o[j][2 * half], state.o[j][2 * half + 1]);
    }
    row.StoreRest(p, item, c);
  }
}

// A piece of a unit whose other blocks belong to other thread blocks: stores it; the last to come joins all and writes the result.
template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void WritePiece(const AttentionLaunch& p, const AttentionExtent& extent, const AttentionSpan& span,
                                           const DeviceAttentionItem& item, const TileRows& tile, int tile_number, TileState<kType, D, kFull>& state, int lane) {
  const int dims = p.layout.value_dim;
  const int64_t unit_begin = span.block_begin + static_cast<int64_t>(tile.head) * span.segments;
  const auto owner = [&](int64_t block) { return static_cast<int>(((block + 1) * extent.parts - 1) / extent.total_blocks); };
  const int first = owner(unit_begin), last = owner(unit_begin + span.segments - 1);
  const auto slot = [&](int who) { return (static_cast<int64_t>(who) * 2 + (who == first ? 1 : 0)) * p.tiles + tile_number; };
  const int64_t mine = slot(blockIdx.x);
  state.Store(p.piece_o + mine * kTileRows * dims, p.piece_ml + mine * kTileRows * 2, dims, tile.rows, dims, lane);
  __threadfence();
  __syncwarp();
  int32_t* arrived = p.arrived + first * p.tiles + tile_number;
  int before = 0;
  if (lane == 0) before = atomicAdd(arrived, 1);
  before = __shfl_sync(~0u, before, 0);
  if (before != last - first) return;
  __threadfence();
  state.Clear();
  for (int who = first; who <= last; ++who) {
    const int64_t at = slot(who);
    state.JoinStored(p.piece_o + at * kTileRows * dims, p.piece_ml + at * kTileRows * 2, dims, tile.rows, dims, lane);
  }
  if (lane == 0) *arrived = 0;
  WriteResult(p, item, tile, state, lane);
}

// One of the attending warps.
template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void Consume(const AttentionLaunch& p, const AttentionExtent& extent, const SharedPlan& shared, int begin,
                                        int end, int warp, int lane) {
  const int tile_number = warp % p.tiles, team = p.team, member = warp / p.tiles;
  if (member >= team) return;
  const uint32_t my_turn = shared.chain + warp * 8;
  const uint32_t next_turn = shared.chain + ((member + 1) % team * p.tiles + tile_number) * 8;
  float* handover_o = shared.handover_o + tile_number * kTileRows * HandoverStride<D>();
  float* handover_ml = shared.handover_ml + tile_number * kTileRows * 2;
  const int bytes = p.layout.bytes();
  uint32_t turn_parity = member == 0 ? 1 : 0;
  Cursor cursor{p.spans + p.first_span[blockIdx.x]};
  TileState<kType, D, kFull> state;

  int skip = member;  // blocks until the next one of this warp
  int stage = member;  // stages are a multiple of the team
  uint32_t parity = 0;
  for (int block = begin; block < end;) {
    cursor.MoveTo(block);
    const AttentionSpan span = *cursor.span;
    const DeviceAttentionItem& item = p.items[span.item];
    const int at = block - span.block_begin, first = at % span.segments;
    const int count = min(span.segments - first, end - block);
    TileRows tile;
    tile.head = at / span.segments;
    tile.row0 = (span.tile_group * p.tiles + tile_number) * kTileRows;
    tile.rows = max(0, min(kTileRows, item.q_rows * p.group - tile.row0));
    const bool works = tile.rows > 0 && !span.sees_nothing;

    state.Clear();
    const bool takes_part = skip < count;
    if (works && takes_part) state.Load(p, item, tile.head, tile.row0, tile.rows, lane);
    int in_piece = skip;
    for (; in_piece < count; in_piece += team) {
      BarrierWait(shared.full + stage * 8, parity);
      __syncwarp();
      if (works) {
        state.Attend(p, shared.ring + stage * bytes, (span.first_segment + first + in_piece) * CudaKvLayout::kTokens, lane);
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(shared.empty + stage * 8);
      stage += team;
      if (stage >= p.stages) {
        stage = member;
        parity ^= 1;
      }
    }
    skip = in_piece - count;

    bool writes = takes_part;
    if (count > 1 && team > 1) {  // from warp to warp
      BarrierWait(my_turn, turn_parity);
      __syncwarp();
      turn_parity ^= 1;
      if (member > 0 && tile.rows > 0) {
        state.JoinStored(handover_o, handover_ml, HandoverStride<D>(), tile.rows, D, lane);
      }
      writes = member == team - 1;
      if (!writes && tile.rows > 0) state.Store(handover_o, handover_ml, HandoverStride<D>(), tile.rows, D, lane);
      __syncwarp();
      if (lane == 0) BarrierArrive(next_turn);
    }
    if (writes && tile.rows > 0) {
      if (count == span.segments) {
        WriteResult(p, item, tile, state, lane);
      } else {
        WritePiece(p, extent, span, item, tile, tile_number, state, lane);
      }
    }
    block += count;
  }
}

template <KvType kType, int D, bool kFull>
__global__ void __launch_bounds__(kThreads, 1) AttentionKernel(const __grid_constant__ AttentionLaunch p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int buffers = p.tiles == kConsumerWarps ? 0 : p.tiles;
  const AttentionExtent extent = *p.extent;
  if (blockIdx.x >= extent.parts) return;
  SharedPlan shared;
  shared.ring = SharedAddress(memory);
  unsigned char* rest = memory + p.stages * p.layout.bytes();
  shared.handover_o = reinterpret_cast<float*>(rest);
  shared.handover_ml = shared.handover_o + buffers * kTileRows * HandoverStride<D>();
  shared.full = SharedAddress(shared.handover_ml + buffers * kTileRows * 2);
  shared.empty = shared.full + 8 * kMaxStages;
  shared.chain = shared.empty + 8 * kMaxStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
#if __CUDA_ARCH__ >= 900
      BarrierInit(shared.full + 8 * i, 1);
#else
      BarrierInit(shared.full + 8 * i, 32);
#endif
      BarrierInit(shared.empty + 8 * i, p.tiles);
    }
    for (int i = 0; i < kConsumerWarps; ++i) BarrierInit(shared.chain + 8 * i, 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __syncthreads();
  const int begin = static_cast<int>(static_cast<int64_t>(blockIdx.x) * extent.total_blocks / extent.parts);
  const int end = static_cast<int>((static_cast<int64_t>(blockIdx.x) + 1) * extent.total_blocks / extent.parts);
  if (warp >= kConsumerWarps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (warp == kConsumerWarps) Produce(p, shared, begin, end, lane);
  } else {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    Consume<kType, D, kFull>(p, extent, shared, begin, end, warp, lane);
  }
}

template <KvType kType, int D, bool kFull>
int LaunchSized(AttentionLaunch launch, const DeviceLimits& limits, cudaStream_t stream) {
  const int fixed = FixedSharedBytes<D>(launch.tiles);
  int stages = (limits.shared_bytes - fixed) / launch.layout.bytes();
  if (stages > kMaxStages) stages = kMaxStages;
  // A stage must always fall to the same warps, or one that is ahead would take the last phase of a barrier for the next.
  for (int team = 1; team <= kConsumerWarps / launch.tiles && team <= stages; ++team) {
    if (stages / team * team >= launch.stages) launch.stages = stages / team * team, launch.team = team;
  }
  if (launch.stages < 2) return static_cast<int>(cudaErrorInvalidConfiguration);
  const int bytes = fixed + launch.stages * launch.layout.bytes();
  const auto kernel = AttentionKernel<kType, D, kFull>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  kernel<<<launch.grid, kThreads, bytes, stream>>>(launch);
  return static_cast<int>(cudaGetLastError());
}

template <KvType kType>
int LaunchTyped(const AttentionLaunch& launch, const DeviceLimits& limits, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const int dim = launch.layout.key_dim > launch.layout.value_dim ? launch.layout.key_dim : launch.layout.value_dim;
  const bool full = launch.layout.key_dim == launch.layout.value_dim;
  if (dim <= 64) return full && dim == 64 ? LaunchSized<kType, 64, true>(launch, limits, s) : LaunchSized<kType, 64, false>(launch, limits, s);
  if (dim <= 128) {
    return full && dim == 128 ? LaunchSized<kType, 128, true>(launch, limits, s) : LaunchSized<kType, 128, false>(launch, limits, s);
  }
  return LaunchSized<kType, 256, false>(launch, limits, s);
}

}  // namespace dovetail::kernels::cuda
