#pragma once
#include <span>
#include <vector>

#include "base/ids.h"

// Which tokens of a prompt each rank of a prefill group takes. Pure functions; deterministic.

namespace dovetail::scheduler {

struct PrefillCutOptions {
  int most_tokens = 2048;  // of one rank
  // The number of earlier tokens over which one token's attention costs as much as its dense layers do: later ranks,
  // which see more, take fewer tokens.
  double par_tokens = 16384;
  // How fast each rank is, against the others; at least as many as there are ranks. Empty: all are equally fast.
  std::span<const double> speeds;
};

// Cuts tokens [base, end) into at most `ranks` parts that take about equally long: a rank that is half as fast gets
// half as much. Returns where the parts begin, and
// the end: [0] is base, the others but the last are multiples of kSegmentTokens.
//   Requires: 0 <= base < end, ranks >= 1, and options.most_tokens x ranks >= end - base + ranks x kSegmentTokens, or
//             else what does not fit is left out: the last cut is less than `end` then.
//   Result:   rising; at least two positions. Fewer than ranks + 1 where there are not as many segments.
std::vector<Position> CutPrefill(Position base, Position end, int ranks, const PrefillCutOptions& options);

}  // namespace dovetail::scheduler
