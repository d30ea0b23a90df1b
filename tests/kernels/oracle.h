#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "kernels/cpu/isa.h"
#include "kernels/op_context.h"

// What each op owes its double-precision reference, and the tools to check it. Budgets were
// measured over the tests' ragged shapes on both ISAs and then frozen at about twice the worst
// case.

namespace dovetail::kernels::testing {

struct OracleRow {
  std::string_view op;
  std::string_view shapes;
  std::string_view dtypes;
  double budget;  // of the error named in `error`
  std::string_view error;
  std::string_view bytes;  // read and written
  std::string_view flops;
};

inline constexpr OracleRow kOracle[] = {
    {"paged_attention", "q [rows, hq, dk], kv [tokens, hk, dk+dv]", "f32", 2e-6, "absolute, |v| <= 1",
     "tokens hk (dk+dv) e / tile", "2 rows tokens hq (dk+dv)"},
    {"paged_attention", "same", "f16", 6e-4, "absolute, |v| <= 1: the rounding of o", "same", "same"},
    {"paged_attention", "same", "bf16", 4.5e-3, "absolute, |v| <= 1: the rounding of o", "same", "same"},
    {"paged_attention", "same", "e4m3", 4.5e-3, "absolute, |v| <= 1, against K and V as they are held: as of bf16",
     "same, e = 1", "same"},
    {"paged_attention", "same", "int8", 4.5e-3, "absolute, |v| <= 1, against K and V as they are held: as of bf16",
     "tokens hk (dk+dv+4) / tile", "same"},
    {"paged_attention.rows", "same", "e4m3", 0.1, "absolute, |v| <= 1, |k| <= 2, against K and V as they were sent",
     "same", "same"},
    {"paged_attention.rows", "same", "int8", 0.015, "absolute, |v| <= 1, |k| <= 2, against K and V as they were sent",
     "same", "same"},
    {"kv_append", "k [rows, hk, dk], v [rows, hk, dv]", "f32 f16 bf16", 0, "exact", "2 rows hk (dk+dv) e", "0"},
    {"rms_norm", "x [rows, n]", "f32", 1e-6, "relative to the largest output of the row", "8 rows n", "4 rows n"},
    {"rope", "x [rows, heads, d]", "f32", 2e-7, "absolute, |x| <= 1", "8 rows heads d", "3 rows heads r"},
    {"silu_mul", "[rows, n]", "f32", 4e-7, "relative", "12 rows n", "~25 rows n"},
    {"gelu_mul", "[rows, n]", "f32", 4e-6, "relative to max(|out|, 1e-3)", "12 rows n", "~30 rows n"},
    {"clamped_swiglu", "[rows, n]", "f32", 1.2e-6, "relative to max(|out|, 1e-3)", "12 rows n", "~28 rows n"},
    {"exp", "[n]", "f32", 1.2, "ulp", "8 n", "~15 n"},
    {"sampling.logprobs", "[vocab]", "f32", 4e-6, "absolute", "4 vocab", "~15 vocab"},
};

constexpr double Budget(std::string_view op, std::string_view dtype) {
  for (const OracleRow& row : kOracle) {
    if (row.op == op && row.dtypes.find(dtype) != std::string_view::npos) return row.budget;
  }
  return -1;  // fails every comparison
}

inline std::string_view ShortName(DType dtype) {
  return dtype == DType::kF32 ? "f32" : dtype == DType::kF16 ? "f16" : "bf16";
}

// The ISAs this CPU can run, weakest first.
inline std::vector<Isa> TestableIsas() {
  std::vector<Isa> isas = {Isa::kAvx2};
  if (DetectIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

// n elements with 64 bytes of a pattern before and after: Intact() says that no kernel wrote past
// either end.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t n, T value = T{}) : storage_(n * sizeof(T) + 2 * kGuard, std::byte{0xa5}), n_(n) {
    for (size_t i = 0; i < n; ++i) data()[i] = value;
  }
  T* data() { return reinterpret_cast<T*>(storage_.data() + kGuard); }
  const T* data() const { return reinterpret_cast<const T*>(storage_.data() + kGuard); }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  size_t size() const { return n_; }
  bool Intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (storage_[i] != std::byte{0xa5} || storage_[storage_.size() - 1 - i] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  std::vector<std::byte> storage_;
  size_t n_;
};

inline std::vector<float> RandomFloats(size_t n, uint64_t seed, float low = -1, float high = 1) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> x(n);
  for (float& v : x) v = uniform(random);
  return x;
}

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// 64-byte aligned scratch.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : memory_(bytes + 64), bytes_(bytes) {}
  std::span<std::byte> span() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return {memory_.data() + (64 - address % 64) % 64, bytes_};
  }

 private:
  std::vector<std::byte> memory_;
  size_t bytes_;
};

}  // namespace dovetail::kernels::testing
