#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/attention_args.h"

namespace dovetail::kernels::cuda {

// Parameters of the linear-state kernels (linear_state.h has the operator; cuda_state.h the host's side). Plain
// structs, device pointers.
// Threads: plain values and pure functions.

inline constexpr int kStateTokens = 64;            // of a state block
inline constexpr int kStateSpan = 32;              // of its halves: decode keeps S between them, too
inline constexpr int kStateSlice = 32;             // value columns that have no use for others
inline constexpr int kStateMaxDim = 256;           // of keys and of values
inline constexpr int kStateMaxConv = 8;            // taps
inline constexpr float kLowestLogDecay = -100.0f;  // e^-100 is 0 in f32

// Where the rows of one part of a state block lie: the first `first_rows` in piece `piece` from byte `offset` on, then
// `piece_rows` in each further piece from its beginning.
struct StateSection {
  int32_t piece = 0, offset = 0, first_rows = 0, piece_rows = 1, row_bytes = 0, rows = 0;
};

// A head's state block on a GPU: the parts of LinearStateLayout, but tokens in 16 bits and decays as logarithms. Fits
// wherever that one fits.
//   state    [key_dim] rows of value_stride f32 (or bf16), after the block's 64 tokens
//   keys     [64] rows bf16;  values [64] rows bf16: v, or u of a delta rule
//   decays   scalar: one row of 64 f32; vector: [64] rows bf16; logarithms
//   history  [64] rows of q, k, v as they came, wire type
//   midway   one row, a word for each 32 value columns: kMidway where `state` has S after the block's first 32 tokens,
//            which it has from then on until there are 64. The kernel that writes the 32nd or the last token of a block
//            writes the word, and only state_decode.cu reads it. Only for dimensions that state_decode.cu has
struct StateLayout {
  StateSection state, keys, values, decays, history, midway;
  int32_t pieces = 0;        // of a head and block
  int32_t value_stride = 0;  // elements of a row of state and values: value_dim up to a multiple of 16
  int32_t key_stride = 0;    // likewise of keys and decays
};

inline constexpr uint32_t kMidway = 0x5779646d;
constexpr bool StateHasMidway(int key_dim, int value_dim) {
  return (key_dim == 64 || key_dim == 128) && value_dim % 32 == 0;
}

// Some consecutive new tokens of one sequence, for a range of heads. Offsets are bytes into the payloads, whose rows
// are as proto::StepLayout says: q, k [rows][heads][key_dim], v, o [rows][heads][value_dim], gates
// [rows][heads][gates].
struct StateItem {
  int64_t query_offset = 0, key_offset = 0, value_offset = 0, gate_offset = 0, out_offset = 0;
  int64_t first_position = 0;
  int64_t table = 0;        // its first entry in StateLaunch::blocks
  int64_t first_block = 0;  // the block of that entry
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t first_head = 0;  // of the model: where its constants lie
  int32_t pad = 0;
};
struct StateUnit {
  int32_t item = 0, head = 0;  // of the item
};

struct StateLaunch {
  const StateItem* items = nullptr;
  const StateUnit* units = nullptr;  // heads of items; null: all have `heads` heads
  int32_t unit_count = 0, heads = 0;

  // Evenly spaced blocks: an entry a block, where piece p of head h lies at entry + ((op heads + h) pieces + p) step.
  // Else an entry a piece: [block][head][piece]. Null: a block that is not kept.
  const std::byte* const* blocks = nullptr;
  int64_t step = 0;
  int32_t even = 0, op = 0;
  int32_t pieces = 1;  // of a head and block

  const std::byte* query = nullptr;
  const std::byte* key_value = nullptr;
  std::byte* out = nullptr;
  WireType wire = WireType::kBF16;  // of q, k, v and o
  // In device memory, or null: where it is not 0, nothing is read and nothing written. Not in the chunked form.
  const uint64_t* failed = nullptr;

  StateLayout layout;
  int32_t key_dim = 0, value_dim = 0;
  int32_t vector_decay = 0, delta = 0, state_bf16 = 0;
  int32_t token_decay = 0, token_rate = 0;  // come as gates: decays, then the rate
  int32_t gates = 0;
  int32_t normalise = 0;  // q and k to unit length
  float query_scale = 1;
  int32_t conv_width = 0, conv_linear = 0;
  int32_t model_heads = 0;
  const float* log_decay = nullptr;  // [model_heads], unless token_decay
  const float* conv = nullptr;       // [conv_width][model_heads][channels]
  const float* conv_bias = nullptr;  // [model_heads][channels] or null
  const float* skip = nullptr;       // [model_heads] or null

  // Of the chunked form: chunks [chunk_begin, chunk_end) of each item, as far as it has so many. A chunk is what an
  // item has in one block of 64 tokens.
  int32_t chunk_begin = 0, chunk_end = 0;
  std::byte* workspace = nullptr;  // [units][chunk_end - chunk_begin] of StateChunkBytes
  float* carry = nullptr;          // [units][key_dim][value_dim], padded: S between calls
};

// Dimensions of the chunked form: keys up to 64 or 128, values in slices.
constexpr int StateChunkKeys(int key_dim) { return key_dim <= 64 ? 64 : 128; }
constexpr int StateChunkValues(int value_dim) { return (value_dim + kStateSlice - 1) / kStateSlice * kStateSlice; }
// Whether products can take q, k and v as they come, so that no copies of them are made.
constexpr bool StateChunksAreDirect(const StateLaunch& p) {
  return p.wire == WireType::kBF16 && p.conv_width == 0 && !p.normalise && !p.vector_decay &&
         p.key_dim == StateChunkKeys(p.key_dim) && p.value_dim % 8 == 0;
}
// Whether v can be taken so, whatever q and k need.
constexpr bool StateValuesAreDirect(const StateLaunch& p) {
  return p.wire == WireType::kBF16 && p.conv_width == 0 && p.value_dim % 8 == 0;
}
// Whether one kernel does all of it, without a workspace, in one launch for all chunks.
constexpr bool StateChunksAreFused(const StateLaunch& p) { return StateChunksAreDirect(p) && !p.delta; }
// Factors of a chunk's tokens, f32, where they are not in q and k: of o, of what is recalled, of keys.
inline constexpr int kStateFactors = 3;
// What one chunk of one head keeps between its two kernels: the weights of the block's tokens among themselves, the
// inverse of the delta rule, factors, the block's decay of each channel; and, unless
// direct, q, k, k as it recalls; v.
constexpr int64_t StateChunkBytes(const StateLaunch& p) {
  if (StateChunksAreFused(p)) return 0;
  const int64_t keys = StateChunkKeys(p.key_dim);
  int64_t columns = kStateTokens + (p.delta ? kStateTokens : 0);
  if (!StateChunksAreDirect(p)) columns += (p.vector_decay && p.delta ? 3 : 2) * keys;
  if (!StateValuesAreDirect(p)) columns += StateChunkValues(p.value_dim);
  return 2 * kStateTokens * columns + 4 * (kStateFactors * kStateTokens + keys);
}
constexpr int64_t StateCarryBytes(int key_dim, int value_dim) {
  return int64_t{4} * StateChunkKeys(key_dim) * StateChunkValues(value_dim);
}

}  // namespace dovetail::kernels::cuda
