#pragma once
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/kv_storage.h"
#include "base/status.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels {

// The memory of one KvBlock: 64 tokens x one KV head x one attention op, K then V, contiguous, in
// bf16, f16 or f32, or in 8 bits where the wire has bf16. A block holds one whole segment, so segment s of a sequence
// is one block.
//
// K lies in four groups of 16 tokens, transposed, so that q.k of 16 tokens runs down the lanes of a
// vector:
//   f32, f16: [4 groups][key_dim][16 tokens]            bf16: [4 groups][key_dim / 2][16 tokens][2]
//   (pairs, for vdpbf16ps); E4M3 and int8 likewise
// V lies row by row: [64 tokens][value_stride], value_stride = value_dim rounded up to 16 elements; the padding is
// never read into a result. Int8 has V in pairs of tokens, [32 pairs][value_stride][2], and after it the scales in
// bf16: those of the keys [64 tokens], then those of the values. A block begins on a 64-byte boundary; K and V take
// multiples of 64 bytes.
// Threads: thread-compatible; a value.
struct KvBlockLayout {
  int key_dim = 0;             // even, 2..256
  int value_dim = 0;           // even, 2..256; may differ from key_dim
  DType dtype = DType::kBF16;  // of rows on the wire, and of elements unless `storage` has them in 8 bits
  KvStorage storage = KvStorage::kAsSent;

  bool eight_bits() const { return storage != KvStorage::kAsSent; }
  size_t element_bytes() const { return eight_bits() ? 1 : SizeOf(dtype); }
  int value_stride() const { return (value_dim + 15) / 16 * 16; }
  size_t key_bytes() const { return size_t{kSegmentTokens} * key_dim * element_bytes(); }
  size_t value_bytes() const { return size_t{kSegmentTokens} * value_stride() * element_bytes(); }
  size_t scale_bytes() const { return storage == KvStorage::kInt8 ? 2 * kSegmentTokens * sizeof(BF16) : 0; }
  size_t bytes() const { return key_bytes() + value_bytes() + scale_bytes(); }

  // Byte offset of element i of the key of token t (0..63) in the block.
  size_t key_offset(int t, int i) const {
    const size_t group = size_t(t / 16) * key_dim * 16;
    const size_t lane = t % 16;
    if (dtype == DType::kBF16) return element_bytes() * (group + size_t(i / 2) * 32 + lane * 2 + i % 2);
    return SizeOf(dtype) * (group + size_t(i) * 16 + lane);
  }
  size_t value_offset(int t, int i) const {
    if (storage == KvStorage::kInt8) return key_bytes() + size_t(t / 2) * 2 * value_stride() + 2 * size_t(i) + t % 2;
    return key_bytes() + element_bytes() * (size_t(t) * value_stride() + i);
  }
  // Of int8.
  size_t key_scale_offset(int t) const { return key_bytes() + value_bytes() + t * sizeof(BF16); }
  size_t value_scale_offset(int t) const { return key_scale_offset(t) + kSegmentTokens * sizeof(BF16); }

  // Elements as float, for references, tests and moving blocks between layouts. Not for the fast
  // path. Of int8: code times scale, not rounded.
  float Key(const std::byte* block, int t, int i) const;
  float Value(const std::byte* block, int t, int i) const;
  // The key and the value of one token, in the wire's type: k [key_dim], v [value_dim].
  void ReadRow(const std::byte* block, int t, std::byte* k, std::byte* v) const;

  static float LoadElement(DType dtype, const std::byte* p);
  static void StoreElement(DType dtype, float x, std::byte* p);  // rounds to nearest even

  // kInvalidArgument for dimensions or types outside the above: 8 bits come from bf16 only.
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
