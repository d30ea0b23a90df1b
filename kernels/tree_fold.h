#pragma once
#include "base/check.h"
#include "kernels/cpu/ops_table.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels {

// Folds partials that arrive from left to right into the value of the full binary tree over absolute segments
// (segment_tree.h): two neighbours merge as soon as nothing that comes later can lie below the node that joins them.
// Whatever subtrees the partials stand for, leaves or larger, from one shard or many, the merges and their order are
// the same. Holds at most kMaxDepth unmerged partials, because the join levels of its neighbours strictly decrease.
// Ownership: the partials' memory belongs to the caller.
// Threads: thread-compatible; a value.
class TreeFold {
 public:
  static constexpr int kMaxDepth = 33;

  TreeFold(const OpsTable& table, int stride) : table_(table), stride_(stride) {}

  // Merges what can be merged before `node` comes. Returns the index its partial will have, which
  // is free from now on: a caller that keeps kMaxDepth slots may load it into that slot.
  int MakeRoom(SegmentNode node) {
    const int join = size_ > 0 ? std::bit_width(static_cast<uint32_t>(entries_[size_ - 1].last ^ node.begin)) : 0;
    while (size_ >= 2 && entries_[size_ - 1].join < join) MergeTop();
    DT_CHECK(size_ < kMaxDepth);
    entries_[size_] = {.partial = nullptr, .last = node.begin + (int32_t{1} << node.level) - 1, .join = join};
    return size_;
  }
  // Adds the partial of the node last given to MakeRoom. It may be overwritten until Finish
  // returns.
  void Push(float* partial) { entries_[size_++].partial = partial; }

  // The root, in the memory of the leftmost partial; null if nothing was pushed.
  float* Finish() {
    while (size_ >= 2) MergeTop();
    return size_ == 1 ? entries_[0].partial : nullptr;
  }

 private:
  struct Entry {
    float* partial;
    int32_t last;  // last segment below it
    int join;      // JoinLevel with the entry on its left
  };
  void MergeTop() {
    table_.merge_partials(entries_[size_ - 2].partial, entries_[size_ - 1].partial, stride_);
    entries_[size_ - 2].last = entries_[size_ - 1].last;
    --size_;
  }

  const OpsTable& table_;
  const int stride_;
  int size_ = 0;
  Entry entries_[kMaxDepth];
};

}  // namespace dovetail::kernels
