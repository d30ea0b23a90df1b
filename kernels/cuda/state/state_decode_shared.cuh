#pragma once
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/warp_arrivals.cuh"
#include "kernels/cuda/state/state_rows.cuh"

// What the warps of the decode kernel (state_decode.cu) share. Device code only.

namespace dovetail::kernels::cuda::decode {

constexpr int kTokens = kStateSpan;
template <bool kVector>
constexpr int kSumWarps = kVector ? 16 : 8;  // multiply; a vector decays each key by itself
constexpr int kTokenWarps = 7;               // prepare tokens, each those of its own heads: they wait for memory
template <bool kVector>
constexpr int kThreads = 32 * (kSumWarps<kVector> + kTokenWarps + 1);
constexpr int kParts = 4;  // of S, by rows: they come and go one by one
constexpr int kSpans = 2;  // of tokens
constexpr int kSharedBytes = 227 << 10;

// A block whose evenly spaced pieces' first address has been read.
struct FoundBlock {
  const std::byte* const* entries;
  std::byte* base;
  int64_t step;

  __device__ __forceinline__ static FoundBlock Of(const StateBlock& block) {
    return {block.entries, block.step != 0 ? block.Piece(0) : nullptr, block.step};
  }
  __device__ __forceinline__ std::byte* Piece(int piece) const {
    return step != 0 ? base + piece * step : const_cast<std::byte*>(entries[piece]);
  }
  __device__ __forceinline__ std::byte* Row(const StateSection& section, int row) const {
    return SectionRow(*this, section, row);
  }
};

// A token, ready to be multiplied. All but the sizes in f32. `behind`: it has been multiplied before and is the last of
// its block's first span, behind which S is not there.
template <int kKeys, int kCols, bool kVector>
struct Token {
  alignas(16) float q[kKeys], k[kKeys];
  alignas(16) float decay[kVector ? kKeys : 4];  // logarithms
  alignas(16) float v[kCols];
  float fade[kVector ? 4 : kTokens];  // from token j to this one
  float total, rate, skip, own;       // decay of the span so far; q k
  int t, second;                      // place in the span; that is its block's second
  int last, fresh, behind;            // of its item; S is zero
  std::byte *value_row, *out;         // where u and o go, of the slice
  FoundBlock block;
};

// A span's tokens as they lie in memory.
template <int kKeys, int kCols, bool kVector>
struct Span {
  alignas(128) __nv_bfloat16 keys[kTokens * kKeys];
  __nv_bfloat16 decays[kVector ? kTokens * kKeys : 8];
  alignas(128) __nv_bfloat16 values[kTokens * kCols];
};

template <int kKeys, int kCols, bool kVector>
struct Fixed {
  Span<kKeys, kCols, kVector> spans[kSpans];
  alignas(128) __nv_bfloat16 low[kVector ? 8 : kTokens * kKeys];  // what faded keys lose when they are rounded
  Token<kKeys, kCols, kVector> tokens[kTokenWarps];
  alignas(16) float query[kVector ? kKeys : 4], recall[kVector ? kKeys : 4];  // faded to the span's beginning
  static constexpr int kWarps = kSumWarps<kVector>;
  alignas(16) float range[kVector ? kWarps : 1][kVector ? kKeys : 4];  // log, of a warp's tokens; log2, behind them
  alignas(16) float log_total[kVector ? kKeys : 4];
  float dots[2][kTokens];  // of q and k with the keys of the span
  alignas(16) float reduce[kWarps][2][kCols];
  uint64_t span_full[kSpans], span_empty[kSpans], token_full[kTokenWarps], token_empty[kTokenWarps];
};

// A ring of parts of S: as many as there is room for.
template <int kKeys, int kCols, bool kVector>
constexpr int kSlots = [] {
  constexpr int kSlotBytes = kKeys / kParts * kCols * 4;
  constexpr int kRoom = kSharedBytes - static_cast<int>(sizeof(Fixed<kKeys, kCols, kVector>)) - 512;
  return kRoom / kSlotBytes < 16 ? kRoom / kSlotBytes : 16;
}();

template <int kKeys, int kCols, bool kVector>
struct Shared : Fixed<kKeys, kCols, kVector> {
  static constexpr int kRing = kSlots<kKeys, kCols, kVector>;
  static_assert(kRing >= kParts);
  uint64_t part_full[kRing], part_empty[kRing];
  alignas(128) float parts[kRing][kKeys / kParts * kCols];  // bf16: the first half of each
};

// Heads and slices of columns in the order in which a thread block takes them: it has every gridDim.x-th.
struct Work {
  StateUnit unit;
  int first_column;
  bool first;  // of the head's slices: it writes what all of them share

  __device__ __forceinline__ static int Count(const StateLaunch& p, int columns) {
    return p.unit_count * (p.value_dim / columns);
  }
  __device__ __forceinline__ static int At(int n) { return static_cast<int>(blockIdx.x + n * gridDim.x); }
  __device__ __forceinline__ Work(const StateLaunch& p, int columns, int n) {
    const int slices = p.value_dim / columns, at = At(n), slice = at % slices;
    unit = UnitOf(p, at / slices);
    first_column = slice * columns;
    first = slice == 0;
  }
};

}  // namespace dovetail::kernels::cuda::decode
