#pragma once
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/kv_storage.h"
#include "kernels/device.h"

namespace dovetail::kernels {

// The row-sized inner loops of the small ops and of attention, compiled once per ISA. Nothing here
// knows a thread, a batch or a block table; each function computes one row, one segment or one run
// of elements on raw pointers, so its bits cannot depend on more. Both ISAs give the same bits
// everywhere but in the scores of bf16 and E4M3 keys, where AVX-512 uses vdpbf16ps. Arguments are checked by
// the callers.
// Threads: reentrant; tables are immutable.

// A partial in memory: float o[stride] (unnormalised; stride = value_dim rounded up to 16), then m,
// then l. `PartialFloats` apart. m = max of the scores, l = sum exp(s - m), o = sum exp(s - m) v;
// nothing seen: m = -inf, l = 0, o = 0.
inline constexpr int PartialStride(int value_dim) { return (value_dim + 15) / 16 * 16; }
inline constexpr int PartialFloats(int value_dim) { return PartialStride(value_dim) + 16; }

inline constexpr int kMaxTileRows = 48;  // (token, head) rows that go through a segment together

// One segment of 64 tokens against up to kMaxTileRows rows that share its KV head.
struct SegmentTask {
  const std::byte* keys = nullptr;  // as KvBlockLayout says
  const std::byte* values = nullptr;
  const std::byte* next_keys = nullptr;  // prefetched meanwhile; may be null
  int key_dim = 0;
  int value_stride = 0;
  float scale = 0;
  int rows = 0;
  const void* const* q = nullptr;   // [rows], as prepare_query left them
  const uint8_t* begin = nullptr;   // [rows] first visible token of the segment, 0..63
  const uint8_t* end = nullptr;     // [rows] one past the last, begin < end <= 64
  float* const* partial = nullptr;  // [rows], overwritten
  float* scores = nullptr;          // scratch [rows][64]
};

struct LogitStats {
  float max = 0;
  int32_t argmax = 0;  // the lowest index on ties
  bool has_nan = false;
};

// Of the elements of blocks: DType, or what comes after it.
constexpr int AttentionIndex(DType dtype, KvStorage storage) {
  return storage == KvStorage::kAsSent ? static_cast<int>(dtype) : storage == KvStorage::kE4M3 ? 3 : 4;
}

struct OpsTable {
  Isa isa = Isa::kAvx2;

  // Indexed by AttentionIndex.
  void (*prepare_query[5])(const void* q, int key_dim, void* out);  // out: 4 * key_dim bytes
  void (*attend_segment[5])(const SegmentTask& task);
  // Indexed by DType.
  void (*to_float[3])(const void* in, float* out, int64_t n);
  void (*from_float[3])(const float* in, void* out, int64_t n);  // rounds to nearest even

  // a = merge(a, b), a left of b. A partial that saw nothing leaves the other bit for bit.
  void (*merge_partials)(float* a, const float* b, int stride);
  // o / l rounded to `dtype`, [value_dim] elements; 0 where nothing was seen. sink: an extra logit
  // without a value, or null.
  void (*finish_partial)(const float* partial, int value_dim, const float* sink, DType dtype, void* out);

  // x [n]; if r: x += r first, stored. out = x * rsqrt(mean(x^2) + eps) * weight. out may be x.
  void (*rms_norm)(float* x, const float* r, const float* weight, float eps, int n, float* out);
  // out pairs (i, i + half) = x pairs rotated by cos, sin [half]. out may be x.
  void (*rope)(const float* x, const float* cos, const float* sin, int half, float* out);
  void (*silu_mul)(const float* gate, const float* up, float* out,
                   int64_t n);                                                  // gate * sigmoid(gate) * up
  void (*gelu_mul)(const float* gate, const float* up, float* out, int64_t n);  // tanh form of GELU
  void (*relu_mul)(const float* gate, const float* up, float* out, int64_t n);  // max(gate, 0) * up
  void (*mul)(const float* gate, const float* up, float* out, int64_t n);
  void (*clamped_swiglu)(const float* gate, const float* up, float* out, int64_t n);  // activation.h
  void (*add)(const float* a, const float* b, float* out, int64_t n);
  void (*scale)(const float* a, float factor, float* out, int64_t n);

  void (*shift_scale)(const float* a, float shift, float factor, float* out,
                      int64_t n);  // (a - shift) * factor

  LogitStats (*logit_stats)(const float* x, int64_t n);  // n >= 1
  double (*sum_exp)(const float* x, float max,
                    int64_t n);  // sum exp(x - max); relative error below 1e-6
  double (*mass_at_least)(const float* x, const float* weight, float threshold,
                          int64_t n);  // sum of weight where x >= threshold
  int64_t (*count_at_least)(const float* x, float threshold, int64_t n);
  // Appends the indices of x[i] >= threshold, ascending, up to `capacity`; returns how many it
  // wrote.
  int64_t (*collect_at_least)(const float* x, float threshold, int64_t n, int32_t* out, int64_t capacity);
  void (*chunk_max)(const float* x, int64_t n, float* out);  // of each 64; out [(n + 63) / 64]
  // out = x + Gumbel(seed, position, i) to about 2e-6 (sampling.h has the exact rule); returns the
  // maximum. out may be x.
  float (*gumbel_scores)(const float* x, int64_t n, uint64_t seed, uint64_t position, float* out);
  void (*exp)(const float* x, float* out, int64_t n);
};

// The table of an ISA. The CPU must have it.
const OpsTable& SelectOps(Isa isa);

const OpsTable& OpsTableAvx2();
const OpsTable& OpsTableAvx512();

}  // namespace dovetail::kernels
