#include "scheduler/core/prefill_plan.h"

#include <algorithm>

#include "base/segment_tree.h"

namespace dovetail::scheduler {
namespace {

// Of the tokens [begin, end): one each for the dense layers, and for the attention over what comes before.
double CostOf(Position begin, Position end, double par_tokens) {
  const auto tokens = static_cast<double>(end - begin);
  return tokens + tokens * static_cast<double>(begin + end) / 2 / par_tokens;
}

// The end of a part from `begin` on that costs about `cost`.
Position EndOf(Position begin, Position most, double cost, double par_tokens) {
  Position low = begin + 1, high = std::max(most, begin + 1);
  while (low < high) {
    const Position middle = low + (high - low) / 2;
    if (CostOf(begin, middle, par_tokens) < cost)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

Position RoundToSegment(Position at) { return (at + kSegmentTokens / 2) / kSegmentTokens * kSegmentTokens; }

}  // namespace

std::vector<Position> CutPrefill(Position base, Position end, int ranks, const PrefillCutOptions& options) {
  std::vector<Position> cuts = {base};
  const auto speed = [&](int rank) { return options.speeds.empty() ? 1 : options.speeds[static_cast<size_t>(rank)]; };
  double speeds_left = 0;
  for (int rank = 0; rank < ranks; ++rank) speeds_left += speed(rank);
  for (int left = ranks; left > 1 && cuts.back() < end; --left) {
    const Position begin = cuts.back();
    const double part = CostOf(begin, end, options.par_tokens) * speed(ranks - left) / speeds_left;
    speeds_left -= speed(ranks - left);
    const Position next = (begin / kSegmentTokens + 1) * kSegmentTokens;  // the first that is allowed
    const Position most = (begin + options.most_tokens) / kSegmentTokens * kSegmentTokens;
    // Later ranks take no more than they may.
    const Position least =
        end - static_cast<Position>(left - 1) * (options.most_tokens / kSegmentTokens * kSegmentTokens);
    const Position wanted = std::max(RoundToSegment(EndOf(begin, end, part, options.par_tokens)),
                                     (least + kSegmentTokens - 1) / kSegmentTokens * kSegmentTokens);
    const Position cut = std::max(next, std::min(wanted, most));
    if (cut >= end || cut - begin > options.most_tokens) break;
    cuts.push_back(cut);
  }
  cuts.push_back(std::min(end, cuts.back() + options.most_tokens));
  return cuts;
}

}  // namespace dovetail::scheduler
