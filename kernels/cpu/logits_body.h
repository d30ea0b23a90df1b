// Passes over a row of logits. Included once per ISA after simd.h.
// Threads: reentrant.
#pragma once
#include "kernels/cpu/ops_table.h"
#include "kernels/cpu/simd.h"

namespace dovetail::kernels::DT_ISA_NS {

static LogitStats Stats(const float* x, int64_t n) {
  const float lowest = -__builtin_inff();
  F32x16 max[4] = {Set1(lowest), Set1(lowest), Set1(lowest), Set1(lowest)};
  F32x16 nan = Zero();  // x - x is NaN for NaN and for infinities: tell them apart only if
                        // something turned up
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const F32x16 v = Load(x + i + j * 16);
      max[j] = Max(v, max[j]);  // NaN in v leaves max
      nan = Fma(v, Zero(), nan);
    }
  }
  for (; i < n; i += 16) {
    const F32x16 v = LoadFirst(x + i, n - i, lowest);
    max[0] = Max(v, max[0]);
    nan = Fma(LoadFirst(x + i, n - i), Zero(), nan);
  }
  LogitStats stats;
  stats.max = ReduceMax(Max(Max(max[0], max[1]), Max(max[2], max[3])));
  if (AnyUnordered(nan)) {
    for (int64_t k = 0; k < n && !stats.has_nan; k += 16) stats.has_nan = AnyUnordered(LoadFirst(x + k, n - k));
  }
  const F32x16 top = Set1(stats.max);
  for (int64_t k = 0; k < n; k += 16) {
    uint32_t equal = EqualMask(LoadFirst(x + k, n - k), top);
    if (n - k < 16) equal &= (1u << (n - k)) - 1;
    if (equal != 0) {
      stats.argmax = static_cast<int32_t>(k + __builtin_ctz(equal));
      break;
    }
  }
  return stats;
}

static double SumExp(const float* x, float max, int64_t n) {
  const F32x16 top = Set1(max);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 1024) {
    const int64_t end = n < begin + 1024 ? n : begin + 1024;
    F32x16 sum[2] = {Zero(), Zero()};
    for (int64_t i = begin; i < end; i += 16) {
      F32x16& s = sum[i / 16 % 2];
      s = Add(s, Exp(Sub(LoadFirst(x + i, end - i, -__builtin_inff()), top)));
    }
    total += ReduceAdd(Add(sum[0], sum[1]));
  }
  return total;
}

static double MassAtLeast(const float* x, const float* weight, float threshold, int64_t n) {
  const F32x16 t = Set1(threshold);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 1024) {
    const int64_t end = n < begin + 1024 ? n : begin + 1024;
    F32x16 sum[2] = {Zero(), Zero()};
    for (int64_t i = begin; i < end; i += 16) {
      F32x16& s = sum[i / 16 % 2];
      s = Add(s, SelectLess(LoadFirst(x + i, end - i, -__builtin_inff()), t, Zero(), LoadFirst(weight + i, end - i)));
    }
    total += ReduceAdd(Add(sum[0], sum[1]));
  }
  return total;
}

// a >= b, false for NaN.
DT_INLINE uint32_t AtLeastMask(F32x16 a, F32x16 b) { return GreaterMask(a, b) | EqualMask(a, b); }

DT_INLINE uint32_t FirstLanes(int64_t n) { return n >= 16 ? 0xffffu : (1u << n) - 1; }

static int64_t CountAtLeast(const float* x, float threshold, int64_t n) {
  const F32x16 t = Set1(threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    count += __builtin_popcount(AtLeastMask(LoadFirst(x + i, n - i), t) & FirstLanes(n - i));
  }
  return count;
}

static int64_t CollectAtLeast(const float* x, float threshold, int64_t n, int32_t* out, int64_t capacity) {
  const F32x16 t = Set1(threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    uint32_t mask = AtLeastMask(LoadFirst(x + i, n - i), t) & FirstLanes(n - i);
    for (; mask != 0; mask &= mask - 1) {
      if (count == capacity) return count;
      out[count++] = static_cast<int32_t>(i + __builtin_ctz(mask));
    }
  }
  return count;
}

static void ChunkMax(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 64) {
    F32x16 max = Set1(-__builtin_inff());
    for (int64_t j = i; j < i + 64 && j < n; j += 16) max = Max(LoadFirst(x + j, n - j, -__builtin_inff()), max);
    out[i / 64] = ReduceMax(max);
  }
}

// Philox 4x32-10 on 16 counters. c in, four words out.
DT_INLINE void Philox(U32x16 (&c)[4], uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    U32x16 high0, low0, high1, low1;
    MulWide(c[0], 0xd2511f53u, high0, low0);
    MulWide(c[2], 0xcd9e8d57u, high1, low1);
    c[0] = Xor(Xor(high1, c[1]), SetU32(k0));
    c[1] = low1;
    c[2] = Xor(Xor(high0, c[3]), SetU32(k1));
    c[3] = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

// -ln(-ln(1 - v)) for v = (w + 0.5) / 2^32, to about 1e-6. The complement of w gives 1 - v with all
// its digits, and the factor v / (1 - rest) gives back what the logarithm of a number near 1 has
// lost.
DT_INLINE F32x16 GumbelOf(U32x16 w) {
  const F32x16 v = UnitInterval(w), rest = UnitInterval(Xor(w, SetU32(0xffffffffu)));
  const F32x16 lost = Sub(Set1(1.0f), rest);
  const F32x16 quotient = Div(Mul(Sub(Zero(), Log(rest)), v), Max(lost, Set1(0x1p-24f)));
  return Sub(Zero(), Log(SelectLess(lost, Set1(0x1p-24f), v, quotient)));
}

static float GumbelScores(const float* x, int64_t n, uint64_t seed, uint64_t position, float* out) {
  F32x16 max = Set1(-__builtin_inff());
  for (int64_t i = 0; i < n; i += 64) {
    U32x16 c[4] = {IotaU32(static_cast<uint32_t>(i / 64 * 16)), SetU32(0), SetU32(static_cast<uint32_t>(position)),
                   SetU32(static_cast<uint32_t>(position >> 32))};
    Philox(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    for (int word = 0; word < 4; ++word) {
      const int64_t at = i + word * 16;
      if (at >= n) break;
      const F32x16 score = Add(LoadFirst(x + at, n - at, -__builtin_inff()), GumbelOf(c[word]));
      max = Max(score, max);
      StoreFirst(out + at, score, n - at);
    }
  }
  return ReduceMax(max);
}

}  // namespace dovetail::kernels::DT_ISA_NS
