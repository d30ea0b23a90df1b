#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/kv_append.h"
#include "kernels/merge_partials.h"
#include "kernels/paged_attention.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/oracle.h"

namespace dovetail::kernels::testing {

// One sequence with random q, k and v for all its positions, in the wire type, and ways to have its
// attention computed.
class TestSequence {
 public:
  TestSequence(const AttentionShape& shape, int kv_heads, int64_t length, uint64_t seed)
      : shape_(shape), kv_heads_(kv_heads), length_(length) {
    q_ = Round(RandomFloats(length * kv_heads * shape.group * shape.key_dim, seed * 3 + 0, -2, 2));
    k_ = Round(RandomFloats(length * kv_heads * shape.key_dim, seed * 3 + 1, -2, 2));
    v_ = Round(RandomFloats(length * kv_heads * shape.value_dim, seed * 3 + 2));
  }

  int heads() const { return kv_heads_ * shape_.group; }
  int64_t length() const { return length_; }
  int kv_heads() const { return kv_heads_; }
  const AttentionShape& shape() const { return shape_; }
  const std::byte* q(int64_t position, int head = 0) const {
    return q_.data() + (position * heads() + head) * shape_.key_dim * SizeOf(shape_.dtype);
  }
  const std::byte* k(int64_t position, int kv_head = 0) const {
    return k_.data() + (position * kv_heads_ + kv_head) * shape_.key_dim * SizeOf(shape_.dtype);
  }
  const std::byte* v(int64_t position, int kv_head = 0) const {
    return v_.data() + (position * kv_heads_ + kv_head) * shape_.value_dim * SizeOf(shape_.dtype);
  }

 private:
  std::vector<std::byte> Round(const std::vector<float>& x) const {
    std::vector<std::byte> out(x.size() * SizeOf(shape_.dtype));
    for (size_t i = 0; i < x.size(); ++i) {
      KvBlockLayout::StoreElement(shape_.dtype, x[i], out.data() + i * SizeOf(shape_.dtype));
    }
    return out;
  }

  AttentionShape shape_;
  int kv_heads_;
  int64_t length_;
  std::vector<std::byte> q_, k_, v_;
};

// The blocks of one shard: KV heads [head_begin, head_end) and tokens [token_begin, token_end) of a
// sequence. Blocks start full of NaN, so that a token read before it is written, or outside the
// mask, shows.
class TestShard {
 public:
  TestShard(const TestSequence& sequence, int head_begin, int head_end, int64_t token_begin, int64_t token_end)
      : sequence_(sequence),
        head_begin_(head_begin),
        heads_(head_end - head_begin),
        begin_(token_begin),
        end_(token_end) {
    const KvBlockLayout layout = sequence.shape().layout();
    first_segment_ = static_cast<int32_t>(begin_ / kSegmentTokens);
    segments_ = static_cast<int32_t>((end_ + kSegmentTokens - 1) / kSegmentTokens) - first_segment_;
    const size_t count = static_cast<size_t>(heads_) * segments_;
    memory_ = std::make_unique<Scratch>(count * layout.bytes());
    std::memset(memory_->span().data(), 0xff, count * layout.bytes());
    for (size_t i = 0; i < count; ++i) blocks_.push_back(memory_->span().data() + (count - 1 - i) * layout.bytes());
  }

  KvBlockTable table() const {
    return {.blocks = blocks_.data(), .head_step = segments_, .first_segment = first_segment_, .segments = segments_};
  }
  int head_begin() const { return head_begin_; }
  int query_heads() const { return heads_ * sequence_.shape().group; }
  int64_t token_begin() const { return begin_; }
  int64_t token_end() const { return end_; }

  // The append of the sequence's tokens [from, to), which belong to this shard; there may be none.
  KvAppendItem AppendItem(int64_t from, int64_t to) const {
    const AttentionShape& shape = sequence_.shape();
    return {.k = sequence_.k(from, head_begin_),
            .v = sequence_.v(from, head_begin_),
            .k_row_step = int64_t{sequence_.kv_heads()} * shape.key_dim,
            .v_row_step = int64_t{sequence_.kv_heads()} * shape.value_dim,
            .rows = static_cast<int>(to - from),
            .kv_heads = heads_,
            .first_position = from,
            .blocks = table()};
  }

  // Appends the sequence's tokens [from, to) as far as they belong to this shard.
  void Append(const OpContext& context, int64_t from, int64_t to) {
    from = std::max(from, begin_);
    to = std::min(to, end_);
    if (from >= to) return;
    const KvAppendItem item = AppendItem(from, to);
    ASSERT_TRUE(KvAppend(context, sequence_.shape().layout(), {&item, 1}).ok());
  }

  std::span<const std::byte> memory() const { return memory_->span(); }

  // The item for rows [position, position + rows) once tokens up to the last row's are there.
  AttentionItem Item(int64_t position, int rows) const {
    return {.q = sequence_.q(position, head_begin_ * sequence_.shape().group),
            .q_row_step = int64_t{sequence_.heads()} * sequence_.shape().key_dim,
            .q_rows = rows,
            .kv_heads = heads_,
            .first_position = position,
            .token_begin = begin_,
            .token_end = std::max(begin_, std::min(end_, position + rows)),
            .blocks = table()};
  }

 private:
  const TestSequence& sequence_;
  int head_begin_, heads_;
  int64_t begin_, end_;
  int32_t first_segment_ = 0, segments_ = 0;
  std::unique_ptr<Scratch> memory_;
  std::vector<std::byte*> blocks_;
};

inline size_t ScratchBytesFor(const OpContext& context, const AttentionShape& shape,
                              std::span<const AttentionItem> items) {
  AttentionLimits limits{.items = static_cast<int>(items.size()), .threads = context.pool->threads()};
  for (const AttentionItem& item : items) {
    limits.rows += item.q_rows;
    limits.kv_heads = std::max(limits.kv_heads, item.kv_heads);
    limits.tokens = std::max(limits.tokens, item.token_end - item.token_begin);
  }
  return PagedAttentionScratchBytes(shape, limits);
}

inline void RunAttention(const OpContext& context, const AttentionShape& shape, std::span<const AttentionItem> items) {
  Scratch scratch(ScratchBytesFor(context, shape, items));
  auto op = PagedAttention::Begin(context, shape, items, scratch.span());
  ASSERT_TRUE(op.ok()) << op.status();
  op->AttendRest();
  op->Finish();
}

}  // namespace dovetail::kernels::testing
