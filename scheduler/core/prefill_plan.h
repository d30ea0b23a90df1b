#pragma once
#include <span>
#include <vector>

#include "base/ids.h"

// Which tokens of a prompt each rank of a prefill group takes.
// Threads: pure; deterministic.

namespace dovetail::scheduler {

struct PrefillCutOptions {
  int most_tokens = 2048;  // of one rank
  // The number of earlier tokens over which one token's attention costs as much as its dense layers do: later ranks,
  // which see more, take fewer tokens.
  double par_tokens = 16384;
  // How fast each rank is, against the others; positive, at least as many as there are ranks. Empty: all are equally
  // fast.
  std::span<const double> speeds;
  // What is left is divided into so many groups more than it needs.
  int more_groups = 0;
};

// How many ranks the next group of a prompt may have, at most `most_ranks`: 1 if it is not to be divided.
//   Units:    tokens; `left` are to be computed, and `whole` were when the prompt's first group began (not fewer)
//   Rule:     each has rank_tokens of the whole prompt. So what is left at the end is divided as what came before it;
//             but no further than into a quarter of a step, or rank_tokens if that is less, for each
//   Requires: rank_tokens >= 1, most_tokens >= 1 (of a rank's step), most_ranks >= 1
int RanksFor(Position left, Position whole, int rank_tokens, int most_tokens, int most_ranks);

// Where a group of `ranks` ends that begins at `base`, of a prompt whose last token is before `end`.
//   Result:   the prompt's end if a group may take all of it. Otherwise what is left is divided into as few groups as
//             can take it, of equal size: the first of those ends on a multiple of kSegmentTokens, as near as that is.
//             So no group is much smaller than others. A slow rank makes groups smaller (its options.speeds), but by no
//             more than an eighth if one more group would be needed for that.
//   Requires: 0 <= base < end, ranks >= 1, options.most_tokens >= kSegmentTokens
Position EndOfGroup(Position base, Position end, int ranks, const PrefillCutOptions& options);

// Cuts tokens [base, end) into at most `ranks` parts that take about equally long: a rank that is half as fast gets
// half as much. Returns where the parts begin, and the end: [0] is base, the others but the last are multiples of
// kSegmentTokens.
//   Requires: 0 <= base < end, ranks >= 1, and options.most_tokens x ranks >= end - base + ranks x kSegmentTokens, or
//             else what does not fit is left out: the last cut is less than `end` then.
//   Result:   rising; at least two positions. Fewer than ranks + 1 where there are not as many segments.
std::vector<Position> CutPrefill(Position base, Position end, int ranks, const PrefillCutOptions& options);

}  // namespace dovetail::scheduler
