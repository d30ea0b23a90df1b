#pragma once
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels {

// The memory of one KvBlock: 64 tokens x one KV head x one attention op, K then V, contiguous, in
// bf16, f16 or f32. A block holds one whole segment, so segment s of a sequence is one block.
//
// K lies in four groups of 16 tokens, transposed, so that q.k of 16 tokens runs down the lanes of a
// vector:
//   f32, f16: [4 groups][key_dim][16 tokens]            bf16: [4 groups][key_dim / 2][16 tokens][2]
//   (pairs, for vdpbf16ps)
// V lies row by row: [64 tokens][value_stride], value_stride = value_dim rounded up to 16 elements;
// the padding is never read into a result. A block begins on a 64-byte boundary; K and V take
// multiples of 64 bytes. Immutable, a value.
struct KvBlockLayout {
  int key_dim = 0;    // even, 2..256
  int value_dim = 0;  // even, 2..256; may differ from key_dim
  DType dtype = DType::kBF16;

  int value_stride() const { return (value_dim + 15) / 16 * 16; }
  size_t key_bytes() const { return size_t{kSegmentTokens} * key_dim * SizeOf(dtype); }
  size_t value_bytes() const { return size_t{kSegmentTokens} * value_stride() * SizeOf(dtype); }
  size_t bytes() const { return key_bytes() + value_bytes(); }

  // Byte offset of element i of the key of token t (0..63) in the block.
  size_t key_offset(int t, int i) const {
    const size_t group = size_t(t / 16) * key_dim * 16;
    const size_t lane = t % 16;
    if (dtype == DType::kBF16) return 2 * (group + size_t(i / 2) * 32 + lane * 2 + i % 2);
    return SizeOf(dtype) * (group + size_t(i) * 16 + lane);
  }
  size_t value_offset(int t, int i) const { return key_bytes() + SizeOf(dtype) * (size_t(t) * value_stride() + i); }

  // Elements as float, for references, tests and moving blocks between layouts. Not for the fast
  // path.
  float Key(const std::byte* block, int t, int i) const { return LoadElement(dtype, block + key_offset(t, i)); }
  float Value(const std::byte* block, int t, int i) const { return LoadElement(dtype, block + value_offset(t, i)); }

  static float LoadElement(DType dtype, const std::byte* p);
  static void StoreElement(DType dtype, float x, std::byte* p);  // rounds to nearest even

  // kInvalidArgument for dimensions or types outside the above.
  absl::Status Validate() const;

  friend bool operator==(const KvBlockLayout&, const KvBlockLayout&) = default;
};

// Where the blocks of one sequence shard lie for one attention op. Block (kv head h, segment
// first_segment + i) is at blocks[h * head_step + i] + offset_bytes. A worker that keeps the blocks
// of all ops of a group behind one pointer builds the table once and changes offset_bytes per op.
// Non-owning: the pointers must outlive the op that gets the table.
struct KvBlockTable {
  std::byte* const* blocks = nullptr;
  int64_t head_step = 0;
  size_t offset_bytes = 0;
  int32_t first_segment = 0;  // absolute
  int32_t segments = 0;       // blocks per head that the table names

  std::byte* block(int kv_head, int32_t segment) const {
    return blocks[kv_head * head_step + (segment - first_segment)] + offset_bytes;
  }
};

}  // namespace dovetail::kernels
