// Attention over one segment of 64 tokens in int8 (kv_block.h). Included once per ISA after attention_body.h.
//
// A query is 16-bit numbers and a scale, so a score is an exact sum of products, turned into a float and multiplied by
// the scales. The weights of a segment, exp(s - m) times the scale of the token's values, are 16-bit numbers and a
// scale likewise. So every sum over dimensions and over tokens is exact, whatever its order: both ISAs give the same
// bits, and a token that a row does not see weighs 0.
// Threads: reentrant.
#pragma once
#include "kernels/cpu/attention_body.h"
#include "kernels/cpu/simd_eight_bits.h"

namespace dovetail::kernels::DT_ISA_NS {

#ifdef DT_ISA_AVX512
constexpr int kTileI8 = 4;  // rows side by side
#else
constexpr int kTileI8 = 2;
#endif

constexpr float kMostI16 = 32767.0f;
constexpr float kLeastWeight = 0x1p-95f;  // weights that are all smaller count as 0: no quotient overflows
constexpr int kScaleBytes = 4 * 64;       // of K and of V, in bf16

// out: int16 [key_dim], then the scale in f32.
static void PrepareQueryI8(const void* q, int key_dim, void* out) {
  alignas(64) float x[256];
  F32x16 most = Zero(), any = Zero();
  for (int i = 0; i < key_dim; i += 16) {
    alignas(32) uint16_t element[16] = {};
    memcpy(element, static_cast<const uint16_t*>(q) + i, static_cast<size_t>(key_dim - i < 16 ? key_dim - i : 16) * 2);
    const F32x16 lanes = LoadBF16(element);
    Store(x + i, lanes);
    most = Max(most, Max(lanes, Sub(Zero(), lanes)));
    any = Add(any, Mul(lanes, Zero()));  // NaN if one is not finite
  }
  const float largest = ReduceMax(most);
  const bool finite = !AnyUnordered(any);
  const F32x16 factor = Set1(finite && largest > kLeastWeight ? kMostI16 / largest : 0.0f);
  alignas(64) int16_t codes[256];
  for (int i = 0; i < key_dim; i += 16) StoreI16(codes + i, Mul(Load(x + i), factor));
  const float scale = finite ? largest / kMostI16 : __builtin_nanf("");
  memcpy(out, codes, static_cast<size_t>(key_dim) * 2);
  memcpy(static_cast<std::byte*>(out) + static_cast<size_t>(key_dim) * 2, &scale, 4);
}

// What is asked for meanwhile: the whole next block, keys and values, since reading it takes as long as this one's
// arithmetic. The first cache holds two blocks of int8, which it does not of bf16. Lines are asked for evenly, so that
// they have all of this block's time to come and do not wait for each other: kLines of them at each step of a tile and
// each pair of tokens, four times as many at each row's weights. With one tile of rows 2, with more 1.
template <int kLines>
struct NextBlock {
  explicit NextBlock(const SegmentTask& task)
      : next(reinterpret_cast<const char*>(task.next_keys != nullptr ? task.next_keys : task.keys)),
        end(task.next_keys == nullptr ? next : next + (task.key_dim + task.value_stride) * 64 + kScaleBytes) {}
  template <int kTimes>
  DT_MEMBER_INLINE void Ask() {
#pragma GCC unroll 8
    for (int i = 0; i < kLines * kTimes; ++i) {
      _mm_prefetch(next, _MM_HINT_T0);
      const char* const after = next + 64;
      next = after < end ? after : next;  // no branch: the last line is asked for again
    }
  }
  const char* next;
  const char* const end;
};
constexpr int kTimesARow = 4;

// A segment's, as floats. Those of tokens that are not there may be anything.
struct ScalesI8 {
  alignas(64) float keys[64];
  alignas(64) float values[64];
};
DT_INLINE void LoadScales(const SegmentTask& task, ScalesI8& scales) {
  const std::byte* at = task.values + task.value_stride * 64;
  for (int g = 0; g < 4; ++g) {
    Store(scales.keys + g * 16, LoadBF16(at + g * 32));
    Store(scales.values + g * 16, LoadBF16(at + kScaleBytes / 2 + g * 32));
  }
}

template <int R, int G, typename Next>
DT_INLINE void ScoreTileI8(const SegmentTask& task, Next& next, const float* key_scales, int row, int group) {
  const int group_bytes = task.key_dim * 16;
  const std::byte* keys = task.keys + group * group_bytes;
  const int steps = task.key_dim / 2;
  I32x16 acc[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[r][g] = ZeroI32();
  }
  for (int i = 0; i < steps; ++i) {
    next.template Ask<1>();
    I16x32 k[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) k[g] = WidenI8(keys + g * group_bytes + i * 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I16x32 q = SetPair(static_cast<const int32_t*>(task.q[row + r])[i]);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) acc[r][g] = DotPairs(acc[r][g], k[g], q);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float q_scale;
    memcpy(&q_scale, static_cast<const std::byte*>(task.q[row + r]) + task.key_dim * 2, 4);
    const F32x16 scale = Set1(task.scale * q_scale);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const F32x16 score = Mul(Mul(ToFloat(acc[r][g]), scale), Load(key_scales + (group + g) * 16));
      Store(task.scores + (row + r) * 64 + (group + g) * 16, score);
    }
  }
}

template <int R, typename Next>
static void ScoreRowsI8(const SegmentTask& task, Next& next, const float* key_scales, int row, int group,
                        int group_end) {
  constexpr int kG = kTileVectors;
  for (; group + kG <= group_end; group += kG) ScoreTileI8<R, kG>(task, next, key_scales, row, group);
  for (; group < group_end; ++group) ScoreTileI8<R, 1>(task, next, key_scales, row, group);
}

// e^x for x <= 0 as Exp has it, with the same bits; NaN for NaN.
DT_INLINE F32x16 ExpOfNegative(F32x16 x) {
  const F32x16 floor = Set1(-87.3f);
  const F32x16 clamped = Max(floor, x);
  const F32x16 n = RoundEven(Mul(clamped, Set1(1.44269504088896341f)));
  const F32x16 r = Fnma(n, Set1(-2.12194440e-4f), Fnma(n, Set1(0.693359375f), clamped));
  F32x16 p = Set1(1.9875691500e-4f);
  p = Fma(p, r, Set1(1.3981999507e-3f));
  p = Fma(p, r, Set1(8.3334519073e-3f));
  p = Fma(p, r, Set1(4.1665795894e-2f));
  p = Fma(p, r, Set1(1.6666665459e-1f));
  p = Fma(p, r, Set1(5.0000001201e-1f));
  p = Fma(Mul(r, r), p, r);
  p = Add(p, Set1(1.0f));
  return SelectLess(x, floor, Zero(), ScalePow2(p, n));
}

// Scores -> weights of 16 bits in the first half of the row, their scale after them; m and l into the partial.
DT_INLINE void WeighRow(float* scores, const float* value_scales, int begin, int end, float* m_out, float* l_out) {
  const bool all = begin == 0 && end == 64;
  F32x16 x[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    x[g] = Load(scores + g * 16);
    if (!all) x[g] = KeepLanes(x[g], begin - g * 16, end - g * 16);
  }
  const float m = ReduceMax(Max(Max(x[0], x[1]), Max(x[2], x[3])));
  const F32x16 reference = Set1(m);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) x[g] = ExpOfNegative(Sub(x[g], reference));
  *m_out = m;
  *l_out = ReduceAdd(Add(Add(x[0], x[1]), Add(x[2], x[3])));
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    x[g] = Mul(x[g], Load(value_scales + g * 16));
    if (!all) x[g] = Max(Zero(), KeepLanes(x[g], begin - g * 16, end - g * 16));  // NaN stays NaN
  }
  const float largest = ReduceMax(Max(Max(x[0], x[1]), Max(x[2], x[3])));
  const bool bad = AnyUnordered(Add(Add(x[0], x[1]), Add(x[2], x[3])));
  const F32x16 factor = Set1(largest > kLeastWeight ? kMostI16 / largest : 0.0f);
  int16_t* const weights = reinterpret_cast<int16_t*>(scores);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) StoreI16(weights + g * 16, Mul(x[g], factor));
  scores[32] = bad ? __builtin_nanf("") : largest * (1 / kMostI16);
}

// o[r][vector..] = the sum over the pairs of tokens [begin, end) of R rows and J vectors of 16 value elements.
template <int R, int J, typename Next>
DT_INLINE void ValueTileI8(const SegmentTask& task, Next& next, int row, int vector, int begin, int end) {
  I32x16 acc[R][J];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) acc[r][j] = ZeroI32();
  }
  const int pair_bytes = task.value_stride * 2;
  const std::byte* values = task.values + vector * 32;
  const float* const scores = task.scores + row * 64;
  for (int t = begin; t < end; ++t) {
    next.template Ask<1>();
    I16x32 v[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) v[j] = WidenI8(values + t * pair_bytes + j * 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I16x32 weight = SetPair(LoadPair(reinterpret_cast<const int16_t*>(scores + r * 64) + 2 * t));
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) acc[r][j] = DotPairs(acc[r][j], v[j], weight);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F32x16 scale = Set1(scores[r * 64 + 32]);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) Store(task.partial[row + r] + (vector + j) * 16, Mul(ToFloat(acc[r][j]), scale));
  }
}

template <int R, typename Next>
static void ValueRowsI8(const SegmentTask& task, Next& next, int row, int begin, int end) {
  constexpr int kJ = kTileVectors;
  const int vectors = task.value_stride / 16;
  int j = 0;
  for (; j + kJ <= vectors; j += kJ) ValueTileI8<R, kJ>(task, next, row, j, begin, end);
  for (; j < vectors; ++j) ValueTileI8<R, 1>(task, next, row, j, begin, end);
}

// Calls visit.operator()<R>(row) for all rows, kTileI8 at a time, then for the rest.
template <typename Visit>
DT_INLINE void ForTilesI8(int rows, Visit visit) {
  int row = 0;
  for (; row + kTileI8 <= rows; row += kTileI8) visit.template operator()<kTileI8>(row);
#ifdef DT_ISA_AVX512
  if (rows - row == 3) return visit.template operator()<3>(row);
  if (rows - row == 2) return visit.template operator()<2>(row);
#endif
  if (rows - row == 1) visit.template operator()<1>(row);
}

template <int kLines>
DT_INLINE void AttendSegmentOfLines(const SegmentTask& task) {
  int first = 64, last = 0;
  for (int r = 0; r < task.rows; ++r) {
    if (task.begin[r] < first) first = task.begin[r];
    if (task.end[r] > last) last = task.end[r];
  }
  NextBlock<kLines> next(task);
  ScalesI8 scales;
  LoadScales(task, scales);
  ForTilesI8(task.rows,
             [&]<int R>(int row) { ScoreRowsI8<R>(task, next, scales.keys, row, first / 16, (last + 15) / 16); });
  for (int r = 0; r < task.rows; ++r) {
    float* partial = task.partial[r] + task.value_stride;
    next.template Ask<kTimesARow>();
    WeighRow(task.scores + r * 64, scales.values, task.begin[r], task.end[r], partial, partial + 1);
  }
  ForTilesI8(task.rows, [&]<int R>(int row) { ValueRowsI8<R>(task, next, row, first / 2, (last + 1) / 2); });
}

static void AttendSegmentI8(const SegmentTask& task) {
  if (task.rows > kTileI8) return AttendSegmentOfLines<1>(task);
  AttendSegmentOfLines<2>(task);
}

}  // namespace dovetail::kernels::DT_ISA_NS
