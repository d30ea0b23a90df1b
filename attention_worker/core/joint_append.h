#pragma once
#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "base/status.h"
#include "proto/prefill_part.h"

namespace dovetail::attention {

// How far the ranks of a prefill group (proto::PrefillPart) have come with one sequence on this attention worker. Its
// watermark decides which ranks may read: a rank may use an op once every rank before it has written its tokens of that
// op.
//   Errors:  kInvalidArgument names what does not fit the group; then nothing has changed.
//   Threads: thread-compatible; a value.
class JointAppend {
 public:
  JointAppend() = default;
  // A group whose first rank comes with `part`; none has begun.
  explicit JointAppend(const proto::PrefillPart& part)
      : group_(part.group), base_(part.base), end_(part.end), next_op_(part.ranks, kNotBegun) {}

  bool active() const { return !next_op_.empty(); }
  StepId group() const { return group_; }

  // Whether this rank of the group at hand may begin.
  absl::Status CheckBegin(const proto::PrefillPart& part) const {
    if (part.base != base_ || part.end != end_ || part.ranks != static_cast<int>(next_op_.size()))
      return InvalidArgument("group ", group_.value(), " has ", next_op_.size(), " ranks for tokens ", base_, "..",
                             end_, ", not ", part.ranks, " for ", part.base, "..", part.end);
    if (next_op_[part.rank] != kNotBegun)
      return InvalidArgument("rank ", part.rank, " of group ", group_.value(), " has begun before");
    return absl::OkStatus();
  }

  // The rank has written its tokens of all ops before this one, those in which it has none here included.
  void Reached(int rank, int op) { next_op_[rank] = op; }

  // Every rank before this one has written its tokens of the op.
  bool MayUse(int rank, int op) const {
    return std::all_of(next_op_.begin(), next_op_.begin() + rank, [op](int next) { return next > op; });
  }

  // Every rank has written all that it has here.
  bool complete(int op_count) const {
    return std::all_of(next_op_.begin(), next_op_.end(), [op_count](int next) { return next >= op_count; });
  }

 private:
  static constexpr int kNotBegun = -1;

  StepId group_;
  Position base_ = 0, end_ = 0;
  absl::InlinedVector<int, 4> next_op_;  // by rank
};

}  // namespace dovetail::attention
