// Norms, rope, activations, conversions: one row or run of elements at a time. Included once per
// ISA after simd.h. Tails are padded, not looped over, so an element's bits do not depend on where
// in a row it lies.
// Threads: reentrant.
#pragma once
#include "kernels/cpu/ops_table.h"
#include "kernels/cpu/simd.h"

namespace dovetail::kernels::DT_ISA_NS {

static void RmsNorm(float* x, const float* r, const float* weight, float eps, int n, float* out) {
  F32x16 sum[4] = {Zero(), Zero(), Zero(), Zero()};
  for (int i = 0, j = 0; i < n; i += 16, j = (j + 1) & 3) {
    F32x16 v = LoadFirst(x + i, n - i);
    if (r != nullptr) {
      v = Add(v, LoadFirst(r + i, n - i));
      StoreFirst(x + i, v, n - i);
    }
    sum[j] = Fma(v, v, sum[j]);
  }
  const float squares = ReduceAdd(Add(Add(sum[0], sum[1]), Add(sum[2], sum[3])));
  const F32x16 inverse = Set1(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) {
    StoreFirst(out + i, Mul(Mul(LoadFirst(x + i, n - i), inverse), LoadFirst(weight + i, n - i)), n - i);
  }
}

static void Rope(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    const F32x16 a = LoadFirst(x + i, n), b = LoadFirst(x + half + i, n);
    const F32x16 c = LoadFirst(cos + i, n), s = LoadFirst(sin + i, n);
    StoreFirst(out + i, Fnma(b, s, Mul(a, c)), n);
    StoreFirst(out + half + i, Fma(a, s, Mul(b, c)), n);
  }
}

// x / (1 + e^-y): x sigmoid(y).
DT_INLINE F32x16 Gate(F32x16 x, F32x16 y) { return Div(x, Add(Set1(1.0f), Exp(Sub(Zero(), y)))); }

static void SiluMul(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 g = LoadFirst(gate + i, n - i);
    StoreFirst(out + i, Mul(Gate(g, g), LoadFirst(up + i, n - i)), n - i);
  }
}

// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
static void GeluMul(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 g = LoadFirst(gate + i, n - i);
    const F32x16 inner = Fma(Mul(Set1(0.044715f), Mul(g, g)), g, g);
    const F32x16 y = Mul(Set1(1.5957691216057308f), inner);
    StoreFirst(out + i, Mul(Gate(g, y), LoadFirst(up + i, n - i)), n - i);
  }
}

static void ReluMul(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    StoreFirst(out + i, Mul(Max(Zero(), LoadFirst(gate + i, n - i)), LoadFirst(up + i, n - i)), n - i);
}

static void MulRows(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) StoreFirst(out + i, Mul(LoadFirst(a + i, n - i), LoadFirst(b + i, n - i)), n - i);
}

// g sigmoid(1.702 g) (up + 1), with g at most 7 and up in [-7, 7].
static void ClampedSwiglu(const float* gate, const float* up, float* out, int64_t n) {
  const F32x16 limit = Set1(7.0f), low = Set1(-7.0f), alpha = Set1(1.702f), one = Set1(1.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 g = Min(limit, LoadFirst(gate + i, n - i));
    const F32x16 u = Max(low, Min(limit, LoadFirst(up + i, n - i)));
    StoreFirst(out + i, Mul(Gate(g, Mul(alpha, g)), Add(u, one)), n - i);
  }
}

static void AddRows(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) StoreFirst(out + i, Add(LoadFirst(a + i, n - i), LoadFirst(b + i, n - i)), n - i);
}

static void ScaleRows(const float* a, float factor, float* out, int64_t n) {
  const F32x16 f = Set1(factor);
  for (int64_t i = 0; i < n; i += 16) StoreFirst(out + i, Mul(LoadFirst(a + i, n - i), f), n - i);
}

static void ShiftScaleRows(const float* a, float shift, float factor, float* out, int64_t n) {
  const F32x16 s = Set1(shift), f = Set1(factor);
  for (int64_t i = 0; i < n; i += 16) StoreFirst(out + i, Mul(Sub(LoadFirst(a + i, n - i), s), f), n - i);
}

static void ExpRows(const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) StoreFirst(out + i, Exp(LoadFirst(x + i, n - i)), n - i);
}

static void F32ToFloat(const void* in, float* out, int64_t n) { memmove(out, in, static_cast<size_t>(n) * 4); }
static void F32FromFloat(const float* in, void* out, int64_t n) { memmove(out, in, static_cast<size_t>(n) * 4); }

template <F32x16 (*LoadHalf)(const void*)>
static void HalfToFloat(const void* in, float* out, int64_t n) {
  const uint16_t* p = static_cast<const uint16_t*>(in);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) Store(out + i, LoadHalf(p + i));
  if (i == n) return;
  uint16_t lanes[16] = {};
  memcpy(lanes, p + i, static_cast<size_t>(n - i) * 2);
  StoreFirst(out + i, LoadHalf(lanes), n - i);
}

template <void (*StoreHalf)(void*, F32x16)>
static void HalfFromFloat(const float* in, void* out, int64_t n) {
  uint16_t* p = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) StoreHalf(p + i, Load(in + i));
  if (i == n) return;
  uint16_t lanes[16];
  StoreHalf(lanes, LoadFirst(in + i, n - i));
  memcpy(p + i, lanes, static_cast<size_t>(n - i) * 2);
}

}  // namespace dovetail::kernels::DT_ISA_NS
