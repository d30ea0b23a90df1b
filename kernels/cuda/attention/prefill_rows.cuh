#pragma once
#include "kernels/cuda/attention/attention_output.cuh"
#include "kernels/cuda/attention/prefill_fold.cuh"
#include "kernels/cuda/attention/prefill_shape.cuh"
#include "kernels/cuda/primitives/attention_wgmma.cuh"
#include "kernels/cuda/primitives/quads.cuh"

// What a warpgroup of the attention kernel for many rows (prefill_kernel.cuh) computes. Device code only, of sm_90a.

namespace dovetail::kernels::cuda {

#if __CUDA_ARCH_FEAT_SM90_ALL

// What one warpgroup keeps of its 64 rows of a tile: this thread's rows, lane / 4 of the warp's 16 and 8 further on.
template <typename S>
struct PrefillRowsState {
  static constexpr int kScoreTiles = S::kKeys / 8, kOutTiles = S::kDim / 8, kWeightSteps = S::kKeys / 16;
  // A new maximum takes the place of an old one only if it is as many times larger (a power of two): o and l keep their
  // factor, and weights stay far below what 16 bits hold.
  static constexpr float kSlack = 8;

  float s[kScoreTiles][4];
  float o[kOutTiles][4];
  uint32_t w[kWeightSteps][4];
  float m[2], l[2];
  int begin[2], end[2];    // visible tokens of the two rows
  int all_begin, all_end;  // tokens that every row of the warpgroup sees

  __device__ __forceinline__ void BeginPiece() {
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0;
  }

  __device__ __forceinline__ void Begin(const PrefillLaunch& p, const PrefillSlot& slot, int row) {
    BeginPiece();
    const int last = slot.item.q_rows * p.group - 1;
    const auto position = [&](int r) { return slot.item.first_position + min(r, last) / p.group; };
    const auto begin_of = [&](int at) { return p.window > 0 ? max(at - p.window + 1, 0) : 0; };
    const auto end_of = [&](int at) { return min(at + 1, slot.item.token_end); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = position(row + 8 * half);
      begin[half] = begin_of(at);
      end[half] = end_of(at);
    }
    const int first_row = row - static_cast<int>(threadIdx.x) % 128 / 32 * 16 - static_cast<int>(threadIdx.x) % 32 / 4;
    all_begin = begin_of(position(first_row + 63));
    all_end = end_of(position(first_row));
  }

  // Issues the scores of a step. The first of several products drops what s held.
  __device__ __forceinline__ void IssueScores(uint32_t queries, uint32_t keys) {
    const uint64_t a = MatrixOf<S::kSlab>(queries), b = MatrixOf<S::kSlab>(keys);
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
      const int slab = 32 * k / S::kSlab, within = 32 * k % S::kSlab;
      const uint64_t a_at = a + (slab * kPrefillRows * S::kSlab + within) / 16;
      const uint64_t b_at = b + (slab * S::kKeys * S::kSlab + within) / 16;
      if (k == 0) {
        ScoresOf<S::kBF16, false>(s, a_at, b_at);
      } else {
        ScoresOf<S::kBF16, true>(s, a_at, b_at);
      }
    }
  }

  // Issues o += w v.
  __device__ __forceinline__ void IssueValues(uint32_t values) {
    const uint64_t b = S::kWide ? MatrixOf<S::kSlab>(values, S::kKeys * S::kSlab) : MatrixOf<128>(values);
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
      const int at = S::kWide ? 16 * k * S::kSlab : k / 4 * S::kDim * 128 + k % 4 * 32;
      AddWeighed<S::kBF16, S::kWide>(o, w[k], b + at / 16);
    }
  }

  __device__ __forceinline__ void Mask(int token0) {
    if (token0 >= all_begin && token0 + S::kKeys <= all_end) return;
    const int mine = token0 + 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = mine + 8 * i + e % 2;
        if (token < begin[e / 2] || token >= end[e / 2]) s[i][e] = -INFINITY;
      }
    }
  }

  // Scores become weights, in s. True: o is to be multiplied by `factor`.
  __device__ __forceinline__ bool Weigh(float scale_log2, float (&factor)[2]) {
    float shift[2];
    bool changes = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
      for (int i = 1; i < kScoreTiles; ++i) top = fmaxf(top, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale_log2;
      factor[half] = 1;
      if (top > m[half] + kSlack) {
        factor[half] = Exp2(m[half] - top);
        m[half] = top;
        changes = true;
      }
      shift[half] = m[half] == -INFINITY ? 0.0f : m[half];
    }
    changes = __any_sync(~0u, changes);
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][e] = Exp2(fmaf(s[i][e], scale_log2, -shift[e / 2]));
        sum[e / 2] += s[i][e];
      }
    }
    l[0] = l[0] * factor[0] + sum[0];
    l[1] = l[1] * factor[1] + sum[1];
    return changes;
  }

  __device__ __forceinline__ void Scale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) {
      o[j][0] *= factor[0], o[j][1] *= factor[0];
      o[j][2] *= factor[1], o[j][3] *= factor[1];
    }
  }

  __device__ __forceinline__ void PackWeights() {
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
      w[k][0] = S::Math::Pack(s[2 * k][0], s[2 * k][1]);
      w[k][1] = S::Math::Pack(s[2 * k][2], s[2 * k][3]);
      w[k][2] = S::Math::Pack(s[2 * k + 1][0], s[2 * k + 1][1]);
      w[k][3] = S::Math::Pack(s[2 * k + 1][2], s[2 * k + 1][3]);
    }
  }

  // Folds the piece at hand with those behind it, of which `memory` has what there is: of every thread (o, then m and
  // l), sixteen bytes of it at a time. What results is in o, m and l; it also stays there, unless it is the tile's
  // last.
  __device__ __forceinline__ void Fold(float4* memory, bool is_first, bool is_last) {
    float4* const mine = memory + threadIdx.x;
    constexpr int kThreads = kPrefillGroups * 128;
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = l[half] + __shfl_xor_sync(~0u, l[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
    if (!is_first) {
      const float4 ml = __ldcg(mine + kOutTiles * kThreads);
      Folded all[2] = {{ml.x, ml.y}, {ml.z, ml.w}};
      const FoldFactors factors[2] = {FoldPiece(all[0], m[0], sum[0]), FoldPiece(all[1], m[1], sum[1])};
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
        const float4 before = __ldcg(mine + j * kThreads);
        o[j][0] = FoldSum(factors[0], before.x, o[j][0]), o[j][1] = FoldSum(factors[0], before.y, o[j][1]);
        o[j][2] = FoldSum(factors[1], before.z, o[j][2]), o[j][3] = FoldSum(factors[1], before.w, o[j][3]);
      }
      m[0] = all[0].m, m[1] = all[1].m;
      sum[0] = all[0].l, sum[1] = all[1].l;
    }
    if (is_last) {  // four threads have a row: their sum is l
      l[0] = Quarter() == 0 ? sum[0] : 0.0f, l[1] = Quarter() == 0 ? sum[1] : 0.0f;
      return;
    }
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) __stcg(mine + j * kThreads, make_float4(o[j][0], o[j][1], o[j][2], o[j][3]));
    __stcg(mine + kOutTiles * kThreads, make_float4(m[0], sum[0], m[1], sum[1]));
  }

  __device__ __forceinline__ void Write(const PrefillLaunch& p, const PrefillSlot& slot, int row) const {
    const int rows = slot.item.q_rows * p.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = l[half] + __shfl_xor_sync(~0u, l[half], 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int at = row + 8 * half;
      if constexpr (S::kPieces) {
        if (slot.tile.piece >= 0) {
          if (at < rows) WritePiece(p, slot.tile, half, at - slot.tile.row0, sum);
          continue;
        }
      }
      const RowResult result = ResultOf(p, slot.item, slot.tile.head, min(at, rows - 1), m[half], sum);
      if (slot.item.first_node == nullptr) {
        WriteRow(p, result, half, at < rows);
      } else if (at < rows) {
        WritePartial(p, slot.item, result, half);
      }
    }
  }

 private:
  __device__ __forceinline__ static int Quarter() { return static_cast<int>(threadIdx.x) % 4; }

  // Four threads have a row.
  __device__ __forceinline__ void WriteRow(const PrefillLaunch& p, const RowResult& result, int half,
                                           bool there) const {
#pragma unroll
    for (int first = 0; first < kOutTiles; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < 4 && first + j < kOutTiles; ++j) {
        words[j] =
            S::WireMath::Pack(o[first + j][2 * half] * result.factor, o[first + j][2 * half + 1] * result.factor);
      }
      TransposeQuad(words);
      if (there && first + Quarter() < kOutTiles) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.o) + result.at + 8 * (first + Quarter())) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void WritePartial(const PrefillLaunch& p, const DeviceAttentionItem& item,
                                               const RowResult& result, int half) const {
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) {
      if (result.nodes == 0) continue;
      *reinterpret_cast<float2*>(p.partial_o + result.at + 8 * j + 2 * Quarter()) =
          make_float2(o[j][2 * half] * result.factor, o[j][2 * half + 1] * result.factor);
    }
    result.StoreRest(p, item, Quarter());
  }

  __device__ __forceinline__ void WritePiece(const PrefillLaunch& p, const PrefillTile& tile, int half, int row,
                                             float sum) const {
    const int64_t at = static_cast<int64_t>(tile.piece) * kPrefillRows + row;
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) {
      *reinterpret_cast<float2*>(p.piece_o + at * S::kDim + 8 * j + 2 * Quarter()) =
          make_float2(o[j][2 * half], o[j][2 * half + 1]);
    }
    if (Quarter() == 0) *reinterpret_cast<float2*>(p.piece_ml + at * 2) = make_float2(m[half], sum);
  }
};

#endif

}  // namespace dovetail::kernels::cuda
