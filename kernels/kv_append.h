#pragma once
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/kv_block.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// Writes k and v of `rows` new tokens at positions first_position.. into the KV blocks of one sequence shard, for all
// its KV heads. The table must name the blocks of every position written. Nothing else of a block changes, so repeating
// an append is harmless.
// Shapes: k [rows][kv_heads][key_dim], v [rows][kv_heads][value_dim], in the wire's type, already rounded by the
// sender; storage of 8 bits rounds them once more, each token and head by itself (kv_eight_bits.h).
struct KvAppendItem {
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t k_row_step = 0;  // elements from row to row; 0: dense
  int64_t v_row_step = 0;
  int rows = 0;
  int kv_heads = 0;
  int64_t first_position = 0;
  KvBlockTable blocks;
};

// Errors:  kInvalidArgument, naming the item, before anything is written.
// Threads: runs on the caller and the pool, returns when done. Two items must not write the same token.
// Memory:  allocates nothing.
// Cost:    rows * kv_heads * (key_dim + value_dim) elements read and written.
absl::Status KvAppend(const OpContext& context, const KvBlockLayout& layout, std::span<const KvAppendItem> items);

}  // namespace dovetail::kernels
