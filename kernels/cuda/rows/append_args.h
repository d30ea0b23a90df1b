#pragma once
#include <cstdint>

#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/exchange/exchange_args.h"

namespace dovetail::kernels::cuda {

// Parameters of the kernels that make keys and values of rows and append them: device pointers, plain structs.
// Activations are in a wire type; sums are in f32.
// Threads: plain values.

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

// Keys from a latent: head h of row r is [own of it | the shared ones].
struct JoinKeysLaunch {
  const void* own = nullptr;     // [rows][heads][own_dim]
  const void* shared = nullptr;  // [rows], shared_dim of them
  void* out = nullptr;           // [rows] of [heads][own_dim + shared_dim]
  WireType type = WireType::kBF16;
  int64_t shared_step = 0, out_step = 0;
  int32_t rows = 0, heads = 0, own_dim = 0, shared_dim = 0;
};

}  // namespace dovetail::kernels::cuda
