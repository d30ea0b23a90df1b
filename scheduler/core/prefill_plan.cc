#include "scheduler/core/prefill_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

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

Position RoundDown(Position at) { return at / kSegmentTokens * kSegmentTokens; }
Position RoundUp(Position at) { return RoundDown(at + kSegmentTokens - 1); }
Position RoundToSegment(Position at) { return (at + kSegmentTokens / 2) / kSegmentTokens * kSegmentTokens; }

// Of a group: what its ranks may take, and what they do in the time that the fastest has for a whole step.
struct GroupTokens {
  Position first_most = 0;  // of one that begins where the group to plan does, and ends on a segment
  Position most = 0;        // of those after it
  Position first_even = 0, even = 0;
};

GroupTokens TokensOfGroup(Position base, int ranks, const PrefillCutOptions& options) {
  const Position first_rank = RoundDown(base + options.most_tokens) - base, rank = RoundDown(options.most_tokens);
  GroupTokens tokens;
  tokens.first_most = tokens.first_even = first_rank + (ranks - 1) * rank;
  tokens.most = tokens.even = ranks * rank;
  if (options.speeds.empty()) return tokens;
  const auto speeds = options.speeds.first(static_cast<size_t>(ranks));
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  const double steps = std::accumulate(speeds.begin(), speeds.end(), 0.0) / fastest;
  const Position even = RoundToSegment(static_cast<Position>(std::ceil(steps * options.most_tokens)));
  tokens.first_even = std::min(tokens.first_most, std::max(first_rank, RoundDown(base + even) - base));
  tokens.even = std::min(tokens.most, std::max(rank, even));
  return tokens;
}

Position GroupsFor(Position left, Position first, Position each) {
  return left <= first ? 1 : 1 + (left - first + each - 1) / each;
}

// A rest that is smaller, against a group, is taken by the groups before it even if their slow ranks take longer.
constexpr Position kSmallRest = 8;

}  // namespace

int RanksFor(Position left, Position whole, int rank_tokens, int most_tokens, int most_ranks) {
  const Position least = std::clamp<Position>(most_tokens / 4, 1, rank_tokens);
  const Position ranks = std::min(std::max(left, whole) / rank_tokens, left / least);
  return static_cast<int>(std::clamp<Position>(ranks, 1, most_ranks));
}

Position EndOfGroup(Position base, Position end, int ranks, const PrefillCutOptions& options) {
  const GroupTokens tokens = TokensOfGroup(base, ranks, options);
  const Position left = end - base, last_more = options.most_tokens % kSegmentTokens;  // it need not end on a segment
  Position groups = GroupsFor(left - last_more, tokens.first_even, tokens.even);
  if (groups > 1) {
    const Position fewer = tokens.first_even + (groups - 2) * tokens.even;
    const bool fits = left <= tokens.first_most + (groups - 2) * tokens.most;
    if (fits && (left - fewer) * kSmallRest <= tokens.even) --groups;
  }
  groups += options.more_groups;
  if (groups == 1) return end;
  const Position least = RoundUp(end - (groups - 1) * tokens.most);
  return std::clamp(RoundToSegment(base + left / groups), std::min(least, base + tokens.first_most),
                    base + tokens.first_most);
}

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
