#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/kv_block.h"
#include "kernels/op_context.h"

namespace dovetail::kernels {

// Softmax attention of a few new tokens per sequence over the KV blocks of one shard of that sequence.
//
// Row r of an item is the query token at position p = first_position + r (one in decode, k in verification, hundreds in
// a prefill chunk). Over the positions t of the shard that it may see (t <= p, and p - t < window if window > 0), with
// group = q heads / kv heads:
//   s_t = scale * <q[r,h], k[t, h/group]>
//   m = max s_t     l = sum exp(s_t - m)     o = sum exp(s_t - m) v[t, h/group]
// summed per aligned segment of 64 tokens and merged in the tree of segment_tree.h. Partials are *unnormalised*:
// (o, m, l) stands for o / l. A device whose partials are normalised (o / l with m = log-sum-exp and l = 1) speaks the
// same format.
//   An item that holds all its sequence's tokens gets o / l, rounded to the wire type. A sink logit joins l once, at
//   the end of the tree. A row that sees nothing gets o = 0.
//   An item of a token shard gets the maximal aligned subtrees of what each row sees, as f32 (merge_partials.h says how
//   to join them). A row that sees nothing gets no subtrees.
// Keys arrive rotated: this op knows no position encoding. q and o have the wire's type, and so have K and V, unless
// their storage is of 8 bits. E4M3 gives the bits that bf16 blocks of the same values give. With int8, q is rounded to
// 16 bits with one scale for the row and head, and the weights of a segment to 16 bits; sums over products are exact.
//
// Numbers: the bits of a row's output depend on its q, on the K and V it sees, on absolute positions and on the ISA;
// never on other rows, q_rows, chunking, shards, the pool or how often AttendComplete was called. Only bf16 and E4M3
// differ between ISAs (ops_table.h).
// Errors:  kInvalidArgument, naming the item and the field, before anything is written; kResourceExhausted if the
// scratch is too small.
// Threads: thread-compatible; runs on the caller and the pool, returns when done.
// Memory:  allocates nothing; the caller owns the scratch.
// Cost:    reads each visible KV byte once per group and tile of 48 (token, head) rows; 2 (key_dim + value_dim) FLOP
// per row and token.
// Oracle:  reference/paged_attention.h.
// Source:  partial softmax after Milakov & Gimelshein 2018; paged layout after Kwon et al. 2023.

// What is equal for all items of a call: one attention op of a model.
struct AttentionShape {
  int group = 1;      // query heads per KV head, 1..256
  int key_dim = 0;    // even, 2..256
  int value_dim = 0;  // even, 2..256
  float scale = 0;
  int window = 0;  // 0: none
  DType dtype = DType::kBF16;
  KvStorage storage = KvStorage::kAsSent;

  KvBlockLayout layout() const { return {key_dim, value_dim, dtype, storage}; }
};

// One shard of one sequence in this step: some KV heads and the tokens [token_begin, token_end).
struct AttentionItem {
  const void* q = nullptr;  // [q_rows][kv_heads * group][key_dim], the head order of the model,
                            // only this shard's heads
  int64_t q_row_step = 0;   // elements from row to row; 0: dense
  int q_rows = 0;
  int kv_heads = 0;
  int64_t first_position = 0;    // of row 0
  int64_t token_begin = 0;       // a multiple of 64
  int64_t token_end = 0;         // one past the last token present once this step's are appended; never
                                 // past a row's own position is read
  KvBlockTable blocks;           // must name every block that a row sees; others may be null
  const float* sinks = nullptr;  // [kv_heads * group] or null; for items that hold all tokens

  // Exactly one of the two outputs. `o` says: this item holds all that its rows see.
  void* o = nullptr;       // [q_rows][kv_heads * group][value_dim], wire type
  int64_t o_row_step = 0;  // elements; 0: dense
  // Subtrees of row 0 from left to right, then row 1, ...: PartialNodes(...) in all, each with all
  // heads.
  float* partial_o = nullptr;   // [nodes][kv_heads * group][value_dim]
  float* partial_ml = nullptr;  // [nodes][kv_heads * group][2]: m, l
};

// Subtrees that an item of a token shard returns, over all its rows. Both ends of the wire compute it.
// Threads: pure.
int64_t PartialNodes(int64_t first_position, int q_rows, int window, int64_t token_begin, int64_t token_end);

// What bounds the scratch of one call.
struct AttentionLimits {
  int items = 0;
  int64_t rows = 0;    // q_rows over all items
  int kv_heads = 0;    // the most of an item
  int64_t tokens = 0;  // the most that a row sees
  int threads = 1;
};
// An upper bound; memory that a call does not need is not touched.
size_t PagedAttentionScratchBytes(const AttentionShape& shape, const AttentionLimits& limits);

// One call, in up to three steps. AttendComplete may be left out:
//   Begin           checks, lays out the scratch.
//   AttendComplete  Q-first: the segments that were full before this step's first token, before k and v of the step
//                   have arrived.
//   AttendRest      everything else, after the append.
//   Finish          writes the outputs.
// Ownership: items, block tables, q (until AttendRest returns), outputs and scratch (until Finish returns) must stay
// valid. Scratch is 64-byte aligned.
class PagedAttention {
 public:
  static absl::StatusOr<PagedAttention> Begin(const OpContext& context, const AttentionShape& shape,
                                              std::span<const AttentionItem> items, std::span<std::byte> scratch);
  void AttendComplete();
  void AttendRest();
  void Finish();

 private:
  struct ItemState;
  struct Task;
  struct Stack;
  struct Chunks;
  struct Tile;

  PagedAttention(const OpContext& context, const AttentionShape& shape, std::span<const AttentionItem> items);
  absl::Status LayOut(std::span<std::byte> scratch);
  void Attend(bool complete_only);
  int PlanTasks(bool complete_only);
  bool PlanChunks(int item, int32_t chunk_segments, std::byte*& free, Task* tasks, int& count);
  void Prepare(const Task& task, Tile& tile) const;
  void RunTask(const Task& task);
  void JoinChunks(int item, int kv_head);
  Stack RowStack(int item, int kv_head, int row) const;
  Stack ChunkStack(int item, int kv_head, int chunk, int row) const;
  void FinishHeads(int item, int64_t row, int kv_head, int64_t node);
  void FinishUnits(int item, int64_t begin, int64_t end);

  OpContext context_;
  AttentionShape shape_;
  std::span<const AttentionItem> items_;
  ItemState* states_ = nullptr;  // all in the scratch
  Task* tasks_ = nullptr;
  int max_tasks_ = 0;
  std::byte* chunk_memory_ = nullptr;
  std::byte* chunk_memory_end_ = nullptr;
};

}  // namespace dovetail::kernels
