#include "scheduler/core/chunk_budget.h"

#include <algorithm>
#include <limits>

#include "base/segment_tree.h"

namespace dovetail::scheduler {
namespace {

constexpr double kNoBound = std::numeric_limits<double>::infinity();
// With more than this share of the time streams would come to almost nothing.
constexpr double kMostShare = 0.95;
// Predictions of longer parts are off by more than what hides.
constexpr double kMostToLearnFrom = 4;
constexpr double kNothing = 1e-6;  // RateEstimator leaves out what took no time

}  // namespace

double ShareFor(std::span<const PromptClaim> claims) {
  double share = 0, left_s = 0;
  for (const PromptClaim& claim : claims) {
    left_s += claim.left_s;
    if (left_s > 0) share = std::max(share, claim.due_s > 0 ? left_s / claim.due_s : kNoBound);
  }
  return share;
}

double ChunkSeconds(const ItlBudget& budget, double itl_s, double prompt_share) {
  if (!budget.on()) return kNoBound;
  if (!budget.automatic) return std::max(0.0, budget.seconds - itl_s);
  if (itl_s <= 0 || prompt_share > kMostShare) return kNoBound;
  return std::max((kItlGrowth - 1) * itl_s, itl_s * prompt_share / (1 - prompt_share));
}

Position ChunkTokens(const ChunkLimits& limits, absl::FunctionRef<double(Position)> seconds_of) {
  const Position most = std::min(limits.left, limits.most);
  if (most <= 0) return 0;
  // Ends are numbered: the k-th is the k-th multiple of 64 after the beginning, and the last one the prompt's end.
  const Position begin = limits.ctx_len / kSegmentTokens;
  const auto tokens_to = [&](Position end) {
    return std::min((begin + end) * kSegmentTokens - limits.ctx_len, limits.left);
  };
  Position last = (limits.ctx_len + most) / kSegmentTokens - begin;
  if (most == limits.left) last = (limits.ctx_len + most + kSegmentTokens - 1) / kSegmentTokens - begin;
  if (last == 0) return limits.least > 0 || seconds_of(most) <= limits.seconds ? most : 0;
  Position first = 0;  // the least that it gets
  while (first < last && tokens_to(first) < limits.least) ++first;
  Position low = first, high = last;
  while (low < high) {
    const Position middle = high - (high - low) / 2;
    if (seconds_of(tokens_to(middle)) <= limits.seconds)
      low = middle;
    else
      high = middle - 1;
  }
  return std::max<Position>(0, tokens_to(low));
}

double StreamPace::Of(WorkerId worker) const {
  const auto known = workers_.find(worker);
  return known == workers_.end() ? 0 : known->second.steps.usual().value_or(0);
}

double StreamPace::Hidden(WorkerId worker) const {
  const auto known = workers_.find(worker);
  return known == workers_.end() ? 0 : std::min(known->second.hidden.usual().value_or(0), Of(worker));
}

void StreamPace::NoteAdded(WorkerId worker, double prompts_s, double added_s) {
  const double pace_s = Of(worker);
  if (pace_s <= 0 || prompts_s > kMostToLearnFrom * pace_s) return;
  workers_[worker].hidden.Note(1, std::clamp(prompts_s - added_s, kNothing * pace_s, pace_s));
}

}  // namespace dovetail::scheduler
