#pragma once
#include <cstdint>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/exchange_args.h"

namespace dovetail::kernels::cuda {

// Parameters of the small kernels: device pointers, plain structs. Activations are in a wire type; sums are in f32.

// Joins what token shards returned (merge_partials.h): row r of head h takes partials [first[r], first[r + 1]) of
// `order`.
struct MergeLaunch {
  const float* partial_o = nullptr;   // [nodes][heads][value_dim]
  const float* partial_ml = nullptr;  // [nodes][heads][2]
  const int32_t* first = nullptr;     // [rows + 1]
  const int32_t* order = nullptr;     // node numbers, row by row, from left to right
  const float* sinks = nullptr;       // [heads] or null
  void* o = nullptr;                  // [rows][heads][value_dim]
  int64_t o_row_step = 0;
  WireType o_type = WireType::kBF16;
  int32_t rows = 0, heads = 0, value_dim = 0;
};

// Joins what rows of prompts see among themselves (PromptCall, with sums) with what they see of earlier tokens, one
// partial a row: prompt i has tokens[i] rows in o, from o_at[i] on, and its partials begin with node[i].
struct JoinPromptsLaunch {
  const float* partial_o = nullptr;   // [nodes][heads][value_dim], times l
  const float* partial_ml = nullptr;  // [nodes][heads][2]
  const float* sums = nullptr;        // [batch or more][heads][sums_tokens]
  const int32_t* tokens = nullptr;    // [batch]
  const int32_t* o_at = nullptr;      // [batch], elements
  const int32_t* node = nullptr;      // [batch]; negative: the prompt has no earlier tokens
  void* o = nullptr;                  // in and out: rows of heads * value_dim
  WireType o_type = WireType::kBF16;
  int32_t batch = 0, most_tokens = 0, heads = 0, value_dim = 0;
  int32_t sums_tokens = 0;
};

// q and k of new tokens are normed per head (optional) and rotated, q is written back, k and v go into KvBlocks or, if
// k_out and v_out are given, into rows of their own: one pass.
struct KvAppendLaunch {
  const void* qkv = nullptr;  // rows of [q heads * key_dim | kv heads * key_dim | kv heads * value_dim]
  int64_t qkv_step = 0;
  const void* v = nullptr;  // v's rows, if they do not lie in qkv
  int64_t v_step = 0;
  WireType type = WireType::kBF16;
  void* q_out = nullptr;  // [rows][q_heads * key_dim], may be the q part of qkv (step qkv_step)
  int64_t q_out_step = 0;
  void* k_out = nullptr;  // [rows][kv_heads * key_dim] and [rows][kv_heads * value_dim], both or none
  void* v_out = nullptr;
  int64_t k_out_step = 0, v_out_step = 0;
  const float* q_norm = nullptr;  // [key_dim] or null
  const float* k_norm = nullptr;
  float norm_eps = 0;
  const float* cos = nullptr;  // [rows][rotary / 2] (RopeTableLaunch); null: no rotation
  const float* sin = nullptr;
  int32_t rotary = 0;
  int32_t rows = 0, q_heads = 0, kv_heads = 0;
  const int32_t* positions = nullptr;          // [rows]
  const int32_t* row_items = nullptr;          // [rows]: which item a row belongs to
  const DeviceAttentionItem* items = nullptr;  // blocks, head_step, first_segment
  int64_t kv_offset = 0;
  CudaKvLayout layout;
  float key_scale = 1;  // k and v are divided by these (E4M3)
  float value_scale = 1;
  // Between two GPUs: waits for message await_op before anything is read, and tells the peer of message signal_op when
  // all is stored (in its memory, where the outputs lie there). Negative: neither. A step that takes turns
  // (ExchangeTurn) and sends gives its turn up.
  ExchangeEnd exchange;
  int32_t await_op = -1, signal_op = -1;
  // Rows of several peers: q, k and v go to those, and all are told; q_out, k_out, v_out and `exchange` count for
  // nothing then. k_out_step and v_out_step as ever.
  const ExchangeFan* fan = nullptr;       // on the device, like
  const ExchangeRow* fan_rows = nullptr;  // [rows]
};

// cos and sin of rows' positions times inv_freq, once a step for all layers that share the frequencies (rope.h).
struct RopeTableLaunch {
  const int32_t* positions = nullptr;  // [rows]
  const float* inv_freq = nullptr;     // [count]
  float* cos = nullptr;                // [rows][count]
  float* sin = nullptr;
  float multiplier = 1;
  int32_t rows = 0, count = 0;
};

struct RmsNormLaunch {
  void* x = nullptr;                                    // [rows][size]; gets x + residual if there is one
  const void* residual = nullptr;                       // or null; the sum of `parts` of them, part_step elements apart
  const float* weight = nullptr;                        // [size]
  void* out = nullptr;                                  // may be x
  int64_t x_step = 0, residual_step = 0, out_step = 0;  // elements
  WireType x_type = WireType::kBF16;                    // of x and residual
  WireType out_type = WireType::kBF16;
  float eps = 0;
  int32_t rows = 0, size = 0;
  int32_t parts = 1;
  int64_t part_step = 0;
};

struct ActivationLaunch {
  const void* gate = nullptr;
  const void* up = nullptr;
  void* out = nullptr;
  int64_t gate_step = 0, up_step = 0, out_step = 0;
  WireType type = WireType::kBF16;
  int32_t gelu = 0;  // else SiLU
  int32_t rows = 0, size = 0;
};

struct SampleOutput;
struct EmbedLaunch {
  const void* table = nullptr;  // [vocab][size]
  const int32_t* ids = nullptr;  // -1 - i: the token of drawn[i]
  const SampleOutput* drawn = nullptr;
  void* out = nullptr;
  WireType table_type = WireType::kBF16;
  WireType out_type = WireType::kBF16;
  float factor = 1;
  int32_t rows = 0, size = 0;
};

// out = a_factor * a + b_factor * b, element by element.
struct CombineLaunch {
  const void* a = nullptr;
  const void* b = nullptr;  // or null
  void* out = nullptr;      // may be a or b
  WireType a_type = WireType::kF32, b_type = WireType::kF32, out_type = WireType::kF32;
  float a_factor = 1, b_factor = 1;
  int64_t count = 0;
};

// Random weights for measuring: evenly spread over -range .. range, the same for the same seed.
struct RandomLaunch {
  void* out = nullptr;
  WireType type = WireType::kBF16;
  float range = 1;
  uint64_t seed = 0;
  int64_t count = 0;
};

// One row of logits to one token (sampling.h).
struct SampleParams {
  float inverse_temperature = 0;  // 0: greedy
  int32_t top_k = 0;              // 0: off
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  uint32_t seed_low = 0, seed_high = 0;
  int32_t position = 0;
  int32_t first_seen = 0, seen = 0;        // of SampleLaunch.seen
  int32_t first_bias = 0, biases = 0;      // of SampleLaunch.biases
  int32_t first_allowed = 0, allowed = 0;  // of SampleLaunch.allowed; 0: all
  int32_t logprob = 0;                     // 1: the token's log-probability is wanted
};
struct SampleSeen {
  int32_t token = 0, generated = 0;
};
struct SampleBias {
  int32_t token = 0;
  float bias = 0;  // -inf: banned
};
struct SampleOutput {
  int32_t token = 0;
  int32_t error = 0;  // 1: a logit is NaN or +inf; 2: nothing is left to choose
  float logprob = 0;
  int32_t rank = 0;
};
struct SampleLaunch {
  const float* logits = nullptr;  // [rows][step]
  float* work = nullptr;          // [rows][work_step]: rows with biases or penalties
  int64_t step = 0;
  int64_t work_step = 0;
  int32_t rows = 0, vocab = 0;
  const SampleParams* params = nullptr;
  const SampleSeen* seen = nullptr;
  const SampleBias* biases = nullptr;
  const int32_t* allowed = nullptr;
  SampleOutput* out = nullptr;
  SampleOutput* host_out = nullptr;  // the same once more in pinned memory, for the host; or null
};

}  // namespace dovetail::kernels::cuda
