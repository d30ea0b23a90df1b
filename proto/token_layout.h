#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/status.h"

// How one tensor lies over P ranks, and what travels to make it lie otherwise. This is the one primitive of sequence
// parallelism: the dynamic switch of DSP (arXiv 2403.10266), the exchange of tokens for heads of Ulysses (2309.14509),
// gathering, splitting, and the hand-over into a placement that is cut otherwise are all a Switch between two Layouts.
// Nothing here moves a byte (sequence_parallel/switch_exchange.h does). Nothing of it travels: every rank computes the
// same Switch.
// Threads: plain values, immutable once made, and pure functions.

namespace dovetail::proto {

inline constexpr int kMaxLayoutRanks = 256;
inline constexpr int kMaxTensorAxes = 8;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 50;

struct Axis {
  std::string name;  // "tokens", "heads", "T", "S", "C"; unique in its tensor
  int64_t size = 0;  // at least 1
  bool operator==(const Axis&) const = default;
};

// A row-major tensor: axes from the outermost to the innermost, as [T, S, C] or [tokens, heads, dim].
struct TensorShape {
  absl::InlinedVector<Axis, 4> axes;
  int64_t element_bytes = 0;

  int AxisOf(std::string_view name) const;  // -1: has none of that name
  int64_t Bytes() const;                    // of a valid shape
  // kInvalidArgument names the axis that is empty, unnamed or there twice, or the limit that is passed; never
  // overflows.
  absl::Status Validate() const;
  std::string DebugString() const;  // "[T 64, S 4096, C 1152] of 2 bytes"
  bool operator==(const TensorShape&) const = default;
};

struct AxisRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool operator==(const AxisRange&) const = default;
};

// What an even cut does with more ranks than the axis has pieces.
enum class FewPieces {
  kRefuse,
  kLeaveEmpty,  // the last ranks hold nothing
  kReplicate,   // neighbours hold the same piece: KV heads fewer than ranks
};

// Which part of a tensor each rank holds: a range of one axis and all of the others, dense and row-major. Ranges of two
// ranks are equal (replicas) or disjoint; together they cover the axis. A rank may hold nothing, so that a hand-over
// from some ranks to others is a Switch like any other: give all of them numbers.
class Layout {
 public:
  // Every rank holds all of it.
  static absl::StatusOr<Layout> Replicated(const TensorShape& shape, int ranks);

  // Pieces of `granularity` along the axis (the last may be smaller), dealt out in order; no rank has two more than
  // another. kInvalidArgument: no such axis, granularity below 1, or, with kRefuse, fewer pieces than ranks.
  struct EvenCut {
    int64_t granularity = 1;
    FewPieces few = FewPieces::kRefuse;
  };
  static absl::StatusOr<Layout> Even(const TensorShape& shape, std::string_view axis, int ranks, const EvenCut& cut);
  static absl::StatusOr<Layout> Even(const TensorShape& shape, std::string_view axis, int ranks) {
    return Even(shape, axis, ranks, EvenCut{});
  }

  // Any ranges, one a rank, in any order. Each begins on a multiple of `granularity`, and ends on one or with the axis.
  // kInvalidArgument names the rank whose range is outside, odd or overlaps, or the first place that is left out.
  static absl::StatusOr<Layout> Of(const TensorShape& shape, std::string_view axis, std::span<const AxisRange> ranges,
                                   int64_t granularity = 1);

  const TensorShape& shape() const { return shape_; }
  int ranks() const { return static_cast<int>(ranges_.size()); }
  // -1: cut along none, each rank holds all of it or nothing. So is a cut into one part, whatever its axis was.
  int axis() const { return axis_; }
  // Of the cut axis; of the first axis if there is none.
  const AxisRange& range(int rank) const { return ranges_[rank]; }
  TensorShape PartShape(int rank) const;  // of a rank that holds something
  int64_t PartBytes(int rank) const;
  std::string DebugString() const;  // "S: 0..2, 2..4", "replicated"

  bool operator==(const Layout&) const = default;

 private:
  Layout(const TensorShape& shape, int axis, std::vector<AxisRange> ranges);

  TensorShape shape_;
  int axis_ = -1;
  std::vector<AxisRange> ranges_;
};

// The cuts of query heads and KV heads that belong together: each rank holds the KV heads that its query heads read,
// and no others. With more ranks than KV heads, neighbours hold the same KV head and divide its query heads.
// kInvalidArgument: query heads are no multiple of KV heads, or some rank would have no query head.
struct HeadLayouts {
  Layout query;
  Layout key_value;
};
absl::StatusOr<HeadLayouts> CutHeads(const TensorShape& query, const TensorShape& key_value, std::string_view axis,
                                     int ranks);

// Bytes of one rank's part: `runs` runs of run_bytes each, one every `step` bytes from `offset` on.
struct Region {
  int64_t offset = 0;
  int64_t runs = 0;
  int64_t run_bytes = 0;
  int64_t step = 0;  // 0 if there is one run
  int64_t bytes() const { return runs * run_bytes; }
  bool operator==(const Region&) const = default;
};

// The bytes of `from` in the source's part are, in this order, those of `to` in the destination's part.
struct Transfer {
  int source = 0;
  int destination = 0;
  Region from;  // in the source's part
  Region to;    // in the destination's part
  int64_t bytes() const { return from.bytes(); }
};

// All that must move for a tensor that lies as `from` to lie as `to`. Of a part that several ranks hold, a rank that
// holds it takes its own copy, and the others take theirs from the replicas in turn.
//
// Per rank, for P ranks and M bytes evenly cut, f = (P-1)/P: cut to cut f M / P; cut to replicated (gather) f M
// received; replicated to cut (split) nothing.
class Switch {
 public:
  // kInvalidArgument: unlike shapes or numbers of ranks.
  static absl::StatusOr<Switch> Between(const Layout& from, const Layout& to);

  const Layout& from() const { return from_; }
  const Layout& to() const { return to_; }
  int ranks() const { return from_.ranks(); }

  // Nothing has to be done: a part before is the same part after. Then there are neither transfers nor copies.
  bool identity() const { return identity_; }

  // At most one for each two ranks; by destination, or by source.
  std::span<const Transfer> SentBy(int rank) const;
  std::span<const Transfer> ReceivedBy(int rank) const;
  // What a rank keeps, from its part before to its part after; null: nothing.
  const Transfer* KeptBy(int rank) const;

  int64_t bytes_sent(int rank) const;
  int64_t bytes_received(int rank) const;
  int64_t bytes_kept(int rank) const;
  int64_t bytes() const;  // that travel, over all ranks

  // Equal for ranks that mean the same switch; says nothing about the data. FNV-1a over shape and both layouts.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  Switch(const Layout& from, const Layout& to) : from_(from), to_(to) {}
  void Plan();

  Layout from_, to_;
  bool identity_ = false;
  uint64_t fingerprint_ = 0;
  std::vector<Transfer> sent_, received_;  // the same ones, by (source, destination) and by (destination, source)
  std::vector<size_t> sent_begin_, received_begin_;  // [ranks + 1]
  std::vector<Transfer> kept_;                       // [ranks]; no runs: nothing
};

}  // namespace dovetail::proto
