// Attention over one segment of 64 tokens, merging and finishing of partials. Included once per ISA
// after simd.h.
//
// The result of a row does not depend on other rows: each score is one chain of FMAs over the
// key dimension in ascending order, but of each pair of bf16 the odd one comes first, as
// vdpbf16ps adds them on the CPUs that have it; the maximum and the sum run over 64 lanes in a fixed tree,
// invisible lanes being -inf and 0; each output element is one chain of FMAs over the visible
// tokens in ascending order. Tiling only decides how many such chains run side by side.
// Threads: reentrant.
#pragma once
#include "kernels/cpu/ops_table.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_eight_bits.h"

namespace dovetail::kernels::DT_ISA_NS {

#ifdef DT_ISA_AVX512
constexpr int kTile = 6;  // rows side by side
constexpr int kTileVectors = 4;
#else
constexpr int kTile = 2;
constexpr int kTileVectors = 2;
#endif

// How the elements of a KV type become floats, and one step of a score chain.
struct ElementF32 {
  static constexpr int kBytes = 4;
  static constexpr int kDimsPerStep = 1;
  static constexpr int kStepBytes = 64;
  static F32x16 LoadValues(const std::byte* p) { return Load(reinterpret_cast<const float*>(p)); }
};
struct ElementF16 {
  static constexpr int kBytes = 2;
  static constexpr int kDimsPerStep = 1;
  static constexpr int kStepBytes = 32;
  static F32x16 LoadValues(const std::byte* p) { return LoadF16(p); }
};
struct ElementBF16 {
  static constexpr int kBytes = 2;
  static constexpr int kDimsPerStep = 2;
  static constexpr int kStepBytes = 64;
  static F32x16 LoadValues(const std::byte* p) { return LoadBF16(p); }
#ifdef DT_ISA_AVX512
  static __m512bh LoadKeys(const std::byte* p) { return (__m512bh)_mm512_loadu_si512(p); }
#else
  static void LoadKeys(const std::byte* p, F32x16& even, F32x16& odd) { LoadPairsBF16(p, even, odd); }
#endif
};
// The same sums as of bf16: every code is a bf16.
struct ElementE4M3 {
  static constexpr int kBytes = 1;
  static constexpr int kDimsPerStep = 2;
  static constexpr int kStepBytes = 32;
  static F32x16 LoadValues(const std::byte* p) { return LoadE4M3(p); }
#ifdef DT_ISA_AVX512
  static __m512bh LoadKeys(const std::byte* p) { return LoadE4M3Pairs(p); }
#else
  static void LoadKeys(const std::byte* p, F32x16& even, F32x16& odd) { LoadE4M3Pairs(p, even, odd); }
#endif
};

// Asks for `bytes` of a block over `steps` steps. Blocks lie scattered, so the hardware's prefetcher starts anew in
// each: the values are asked for while the keys are read, and the next block's keys while the values are.
struct Prefetcher {
  Prefetcher(const std::byte* block, int bytes, int steps)
      : next(reinterpret_cast<const char*>(block)), end(next + bytes), share((bytes / 64 + steps - 1) / steps * 64) {}
  DT_MEMBER_INLINE void Step() {
    const char* const until = end - next < share ? end : next + share;
    for (; next < until; next += 64) _mm_prefetch(next, _MM_HINT_T0);
  }
  const char* next;
  const char* const end;
  const int share;  // bytes of a step
};

// acc[r][g] over all key dimensions for R rows and G groups of 16 tokens beginning at `keys`.
template <typename E, int R, int G, bool kPrefetch>
DT_INLINE void ScoreTile(const SegmentTask& task, int row, int group) {
  const int group_bytes = task.key_dim * 16 * E::kBytes;
  const std::byte* keys = task.keys + group * group_bytes;
  const int steps = task.key_dim / E::kDimsPerStep;
  Prefetcher prefetcher(task.values, task.value_stride * 64 * E::kBytes, steps);
  F32x16 acc[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[r][g] = Zero();
  }
  for (int i = 0; i < steps; ++i) {
    const std::byte* p = keys + i * E::kStepBytes;
    if constexpr (kPrefetch) prefetcher.Step();
    if constexpr (E::kDimsPerStep == 2) {
#ifdef DT_ISA_AVX512
      __m512bh k[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) k[g] = E::LoadKeys(p + g * group_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh q = (__m512bh)_mm512_set1_epi32(static_cast<const int32_t*>(task.q[row + r])[i]);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[r][g].v = _mm512_dpbf16_ps(acc[r][g].v, k[g], q);
      }
#else
      F32x16 even[G], odd[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) E::LoadKeys(p + g * group_bytes, even[g], odd[g]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float* q = static_cast<const float*>(task.q[row + r]) + 2 * i;
        const F32x16 q0 = Set1(q[0]), q1 = Set1(q[1]);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[r][g] = Fma(q0, even[g], Fma(q1, odd[g], acc[r][g]));
      }
#endif
    } else {
      F32x16 k[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) k[g] = E::LoadValues(p + g * group_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32x16 q = Set1(static_cast<const float*>(task.q[row + r])[i]);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[r][g] = Fma(q, k[g], acc[r][g]);
      }
    }
  }
  const F32x16 scale = Set1(task.scale);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) Store(task.scores + (row + r) * 64 + (group + g) * 16, Mul(acc[r][g], scale));
  }
}

template <typename E, int R, bool kPrefetch>
DT_INLINE void ScoreGroups(const SegmentTask& task, int row, int g, int group_end) {
  if constexpr (kTileVectors >= 4) {
    for (; g + 4 <= group_end; g += 4) ScoreTile<E, R, 4, kPrefetch>(task, row, g);
  }
  if (g + 2 <= group_end) {
    ScoreTile<E, R, 2, kPrefetch>(task, row, g);
    g += 2;
  }
  for (; g + 2 <= group_end; g += 2) ScoreTile<E, R, 2, false>(task, row, g);
  if (g < group_end) ScoreTile<E, R, 1, false>(task, row, g);
}

template <typename E, int R>
static void ScoreRows(const SegmentTask& task, int row, int group_begin, int group_end) {
  if (row == 0) {
    ScoreGroups<E, R, true>(task, row, group_begin, group_end);
  } else {
    ScoreGroups<E, R, false>(task, row, group_begin, group_end);
  }
}

// Scores -> exp(s - m) in place, m and l into the partial.
DT_INLINE void SoftmaxRow(float* scores, int begin, int end, float* m_out, float* l_out) {
  const F32x16 nothing = Set1(-__builtin_inff());
  F32x16 s[4];
  for (int g = 0; g < 4; ++g) {
    s[g] = nothing;
    if (begin < g * 16 + 16 && end > g * 16) s[g] = KeepLanes(Load(scores + g * 16), begin - g * 16, end - g * 16);
  }
  const float m = ReduceMax(Max(Max(s[0], s[1]), Max(s[2], s[3])));
  const F32x16 reference = Set1(m);
  for (int g = 0; g < 4; ++g) {
    s[g] = Exp(Sub(s[g], reference));
    Store(scores + g * 16, s[g]);
  }
  *m_out = m;
  *l_out = ReduceAdd(Add(Add(s[0], s[1]), Add(s[2], s[3])));
}

// o[r][vector..] (+)= p[r][t] v[t] for tokens [begin, end) of R rows and J vectors of 16 value
// elements.
template <typename E, int R, int J>
DT_INLINE void ValueTile(const SegmentTask& task, int row, int vector, int begin, int end, bool fresh) {
  F32x16 acc[R][J];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) acc[r][j] = fresh ? Zero() : Load(task.partial[row + r] + (vector + j) * 16);
  }
  const int row_bytes = task.value_stride * E::kBytes;
  const std::byte* values = task.values + vector * 16 * E::kBytes;
  const float* p = task.scores + row * 64;
  const bool prefetch = row == 0 && vector == 0 && task.next_keys != nullptr;
  Prefetcher prefetcher(task.next_keys, task.key_dim * 64 * E::kBytes, 64);
  for (int t = begin; t < end; ++t) {
    if (prefetch) prefetcher.Step();
    const std::byte* v_row = values + t * row_bytes;
    F32x16 v[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) v[j] = E::LoadValues(v_row + j * 16 * E::kBytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = Set1(p[r * 64 + t]);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) acc[r][j] = Fma(weight, v[j], acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) Store(task.partial[row + r] + (vector + j) * 16, acc[r][j]);
  }
}

template <typename E, int R>
static void ValueRows(const SegmentTask& task, int row, int begin, int end, bool fresh) {
  const int vectors = task.value_stride / 16;
  int j = 0;
  if constexpr (kTileVectors >= 4) {
    for (; j + 4 <= vectors; j += 4) ValueTile<E, R, 4>(task, row, j, begin, end, fresh);
  }
  for (; j + 2 <= vectors; j += 2) ValueTile<E, R, 2>(task, row, j, begin, end, fresh);
  if (j < vectors) ValueTile<E, R, 1>(task, row, j, begin, end, fresh);
}

// The tokens that all R rows see run together; those before and after, row by row. Each row still
// goes through its tokens in order.
template <typename E, int R>
static void ValueRowsMasked(const SegmentTask& task, int row) {
  int common_begin = 0, common_end = 64;
  for (int r = row; r < row + R; ++r) {
    if (task.begin[r] > common_begin) common_begin = task.begin[r];
    if (task.end[r] < common_end) common_end = task.end[r];
  }
  if constexpr (R == 1) {
    ValueRows<E, 1>(task, row, common_begin, common_end, true);
  } else {
    if (common_begin >= common_end) {
      for (int r = row; r < row + R; ++r) ValueRows<E, 1>(task, r, task.begin[r], task.end[r], true);
      return;
    }
    bool fresh = true;
    for (int r = row; r < row + R; ++r) fresh = fresh && task.begin[r] == common_begin;
    if (!fresh) {
      for (int r = row; r < row + R; ++r) ValueRows<E, 1>(task, r, task.begin[r], common_begin, true);
    }
    ValueRows<E, R>(task, row, common_begin, common_end, fresh);
    for (int r = row; r < row + R; ++r) {
      if (task.end[r] > common_end) ValueRows<E, 1>(task, r, common_end, task.end[r], false);
    }
  }
}

// Calls F<E, R>(task, row, ...) for all rows, kTile at a time, then one call for the rest.
template <typename E>
DT_INLINE void AllScores(const SegmentTask& task, int group_begin, int group_end) {
  int row = 0;
  for (; row + kTile <= task.rows; row += kTile) ScoreRows<E, kTile>(task, row, group_begin, group_end);
  switch (task.rows - row) {
#ifdef DT_ISA_AVX512
    case 5: ScoreRows<E, 5>(task, row, group_begin, group_end); break;
    case 4: ScoreRows<E, 4>(task, row, group_begin, group_end); break;
    case 3: ScoreRows<E, 3>(task, row, group_begin, group_end); break;
    case 2: ScoreRows<E, 2>(task, row, group_begin, group_end); break;
#endif
    case 1: ScoreRows<E, 1>(task, row, group_begin, group_end); break;
    default: break;
  }
}

template <typename E>
DT_INLINE void AllValues(const SegmentTask& task) {
  int row = 0;
  for (; row + kTile <= task.rows; row += kTile) ValueRowsMasked<E, kTile>(task, row);
  switch (task.rows - row) {
#ifdef DT_ISA_AVX512
    case 5: ValueRowsMasked<E, 5>(task, row); break;
    case 4: ValueRowsMasked<E, 4>(task, row); break;
    case 3: ValueRowsMasked<E, 3>(task, row); break;
    case 2: ValueRowsMasked<E, 2>(task, row); break;
#endif
    case 1: ValueRowsMasked<E, 1>(task, row); break;
    default: break;
  }
}

template <typename E>
static void AttendSegment(const SegmentTask& task) {
  int first = 64, last = 0;
  for (int r = 0; r < task.rows; ++r) {
    if (task.begin[r] < first) first = task.begin[r];
    if (task.end[r] > last) last = task.end[r];
  }
  AllScores<E>(task, first / 16, (last + 15) / 16);
  for (int r = 0; r < task.rows; ++r) {
    float* partial = task.partial[r] + task.value_stride;
    SoftmaxRow(task.scores + r * 64, task.begin[r], task.end[r], partial, partial + 1);
  }
  AllValues<E>(task);
}

static void PrepareQueryF32(const void* q, int key_dim, void* out) { memcpy(out, q, static_cast<size_t>(key_dim) * 4); }
static void PrepareQueryF16(const void* q, int key_dim, void* out) {
  for (int i = 0; i < key_dim; ++i) static_cast<float*>(out)[i] = _cvtsh_ss(static_cast<const uint16_t*>(q)[i]);
}
static void PrepareQueryBF16(const void* q, int key_dim, void* out) {
#ifdef DT_ISA_AVX512
  memcpy(out, q, static_cast<size_t>(key_dim) * 2);  // vdpbf16ps reads pairs
#else
  for (int i = 0; i < key_dim; ++i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(q)[i]) << 16;
    memcpy(static_cast<float*>(out) + i, &bits, 4);
  }
#endif
}

DT_INLINE bool SawNothing(float m, float l) { return l == 0.0f && m == -__builtin_inff(); }

static void MergePartials(float* a, const float* b, int stride) {
  const float m_a = a[stride], l_a = a[stride + 1], m_b = b[stride], l_b = b[stride + 1];
  if (SawNothing(m_b, l_b)) return;
  if (SawNothing(m_a, l_a)) {
    memcpy(a, b, static_cast<size_t>(stride + 2) * 4);
    return;
  }
  const bool a_counts_more = m_a > m_b;
  const float m = a_counts_more ? m_a : m_b;
  const F32x16 less = Exp(Set1((a_counts_more ? m_b : m_a) - m)), one = Set1(1.0f);  // which is Exp(0)
  const F32x16 scale_a = a_counts_more ? one : less, scale_b = a_counts_more ? less : one;
  for (int i = 0; i < stride; i += 16) Store(a + i, Fma(Load(b + i), scale_b, Mul(Load(a + i), scale_a)));
  alignas(64) float l[16];
  Store(l, Fma(Set1(l_b), scale_b, Mul(Set1(l_a), scale_a)));
  a[stride] = m;
  a[stride + 1] = l[0];
}

DT_INLINE void StoreElements(DType dtype, F32x16 x, std::byte* out, int n) {
  alignas(64) std::byte lanes[64];
  if (dtype == DType::kF32) {
    Store(reinterpret_cast<float*>(lanes), x);
  } else if (dtype == DType::kBF16) {
    StoreBF16(lanes, x);
  } else {
    StoreF16(lanes, x);
  }
  memcpy(out, lanes, static_cast<size_t>(n) * (dtype == DType::kF32 ? 4 : 2));
}

static void FinishPartial(const float* partial, int value_dim, const float* sink, DType dtype, void* out) {
  const int stride = (value_dim + 15) / 16 * 16;
  const float m = partial[stride];
  float l = partial[stride + 1];
  F32x16 scale = Set1(1.0f);
  const bool nothing = SawNothing(m, l);
  if (!nothing && sink != nullptr) {
    const float top = m > *sink ? m : *sink;
    scale = Exp(Set1(m - top));
    alignas(64) float sum[16];
    Store(sum, Fma(Set1(l), scale, Exp(Set1(*sink - top))));
    l = sum[0];
  }
  const F32x16 denominator = Set1(l);
  std::byte* bytes = static_cast<std::byte*>(out);
  const int element = dtype == DType::kF32 ? 4 : 2;
  for (int i = 0; i < value_dim; i += 16) {
    const F32x16 o = nothing ? Zero() : Div(Mul(Load(partial + i), scale), denominator);
    StoreElements(dtype, o, bytes + i * element, value_dim - i < 16 ? value_dim - i : 16);
  }
}

}  // namespace dovetail::kernels::DT_ISA_NS
