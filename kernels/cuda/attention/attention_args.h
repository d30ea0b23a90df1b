#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/kv_layout.h"
#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// What the host hands to the attention kernels: structs that lie in device memory or in kernel parameters.
// Threads: plain values.

inline constexpr int kTileRows = 16;      // (token, head) rows of one tensor core tile
inline constexpr int kConsumerWarps = 8;  // of a thread block; kTiles below is 1, 2, 4 or 8
inline constexpr int kMaxMergePieces = 1024;

// One shard of one sequence (AttentionItem in paged_attention.h), with offsets where that has pointers, so that one
// upload a step serves all layers.
struct DeviceAttentionItem {
  int64_t q_offset = 0;    // elements from the call's q to row 0, a multiple of 8
  int64_t q_row_step = 0;  // elements, a multiple of 8
  int64_t o_offset = 0;    // elements from the call's o to row 0
  int64_t o_row_step = 0;
  const std::byte* const* blocks =
      nullptr;                   // device pointers in device memory: block (head h, segment first_segment + i) is
  int64_t head_step = 0;         // at blocks[h * head_step + i] + kv_offset
  const float* sinks = nullptr;  // [kv_heads * group] or null
  const int32_t* first_node = nullptr;  // partial outputs: [q_rows + 1], the first subtree of each row; null: writes o
  int32_t first_segment = 0;
  int32_t kv_heads = 0;
  int32_t q_rows = 0;
  int32_t first_position = 0;
  int32_t token_end = 0;
  int32_t pad = 0;
};

// A run of equal work: for each KV head of an item, the blocks that one group of `tiles` row tiles sees. Blocks are
// numbered through all spans, heads and segments.
struct AttentionSpan {
  int32_t item = 0;
  int32_t tile_group = 0;  // rows [tile_group * tiles * 16, ...) of the item's q_rows * group
  int32_t block_begin = 0;
  int32_t block_end = 0;
  int32_t segments = 0;  // per KV head, >= 1
  int32_t first_segment = 0;
  int32_t sees_nothing = 0;  // 1: one pretended block a head, which is never read
  int32_t pad = 0;
};

// What a thread block does: blocks [begin, end). Of the blocks of a KV head, its first may follow others of that head
// in earlier parts, its last precede others in later ones.
struct AttentionPart {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t span = 0;        // that holds `begin`
  int16_t first_part = 0;  // where the head of `begin` begins
  int16_t last_part = 0;   // where the head of `end - 1` ends
};

// What of a plan changes from step to step and is not in a launch's parameters, so that a recorded launch stays
// right. `parts` thread blocks share all blocks; each has at least one.
struct AttentionExtent {
  int32_t blocks = 0;
  int32_t parts = 0;  // <= grid
};

// What the kernels for few rows and for many (prefill_args.h) have in common.
struct AttentionCall {
  const void* q = nullptr;
  void* o = nullptr;
  float* partial_o = nullptr;   // [nodes][heads of the item][value_dim]
  float* partial_ml = nullptr;  // [nodes][heads of the item][2]
  const DeviceAttentionItem* items = nullptr;
  int64_t kv_offset = 0;  // bytes from a block pointer to this op's block
  CudaKvLayout layout;
  WireType q_type = WireType::kBF16;
  WireType o_type = WireType::kBF16;
  int32_t group = 1;
  int32_t window = 0;
  float scale_log2 = 0;  // scale * log2(e) * k_scale
  float value_scale = 1;
  int32_t grid = 0;
};

struct AttentionLaunch : AttentionCall {
  const AttentionSpan* spans = nullptr;
  const AttentionPart* parts = nullptr;
  const AttentionExtent* extent = nullptr;
  float* piece_o = nullptr;    // [grid][2][tiles][16][value_dim]: pieces of rows whose blocks lie in several parts
  float* piece_ml = nullptr;   // [grid][2][tiles][16][2]
  int32_t* arrived = nullptr;  // [grid][tiles], zero before and after
  int32_t tiles = 1;           // row tiles that share a pass over the KV: 1, 2, 4 or 8
  int32_t stages = 0;          // blocks in flight, a multiple of team; filled by the launcher
  int32_t team = 1;            // warps that take turns at the blocks, for each of the tiles
};

// What a device offers to a kernel.
struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one thread block, opted in
  int major = 0;
  int minor = 0;
};

// Enqueues one pass. cudaError_t as int; 0: enqueued. The plan must fit the launch (attention_plan.h).
// Threads: any host thread, one at a time per stream.
int LaunchAttentionBF16(AttentionLaunch launch, const DeviceLimits& limits, void* stream);
int LaunchAttentionF16(AttentionLaunch launch, const DeviceLimits& limits, void* stream);
int LaunchAttentionE4M3(AttentionLaunch launch, const DeviceLimits& limits, void* stream);

}  // namespace dovetail::kernels::cuda
