#include "scheduler/core/chunk_budget.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/segment_tree.h"

namespace dovetail::scheduler {
namespace {

constexpr double kNoBound = std::numeric_limits<double>::infinity();
// With more than this share of the time streams would come to almost nothing.
constexpr double kMostShare = 0.95;
// Predictions of longer parts are off by more than what hides.
constexpr double kMostToLearnFrom = 4;
constexpr double kNothing = 1e-6;   // RateEstimator leaves out what took no time
constexpr double kLeastPart = 0.5;  // of what a step takes longer for any part
// Steps whose prompts differ by less say nothing about a slope, nor do so few pairs of others.
constexpr double kDiffer = 1.5;
constexpr size_t kLeastPairs = 5;
constexpr double kLeastSlope = 0.25, kMostSlope = 8;  // as corrections

double MedianOf(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

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

double PartSeconds(double bear_s, double step_s) { return std::max(bear_s - step_s, kLeastPart * step_s); }

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

void StreamPace::NoteAdded(WorkerId worker, double prompts_s, double added_s, double correction) {
  const double pace_s = Of(worker);
  if (pace_s <= 0 || prompts_s > kMostToLearnFrom * pace_s) return;
  Worker& known = workers_[worker];
  known.hidden.Note(1, std::clamp(prompts_s - added_s, kNothing * pace_s, pace_s));
  if (prompts_s <= 0 || correction <= 0) return;
  known.with_prompts[known.count++ % kKept] = {prompts_s / correction, added_s};
  known.correction = correction;
}

double StreamPace::Worker::Slope() const {
  std::vector<double> slopes;
  for (size_t i = 0; i < known(); ++i) {
    for (size_t j = 0; j < known(); ++j) {
      const Step &less = with_prompts[i], &more = with_prompts[j];
      if (more.uncorrected_s < kDiffer * less.uncorrected_s) continue;
      slopes.push_back((more.added_s - less.added_s) / (more.uncorrected_s - less.uncorrected_s));
    }
  }
  if (slopes.size() < kLeastPairs) return correction;
  return std::clamp(MedianOf(std::move(slopes)), kLeastSlope, kMostSlope);
}

double StreamPace::StepSeconds(WorkerId worker) const {
  const auto it = workers_.find(worker);
  if (it == workers_.end() || it->second.known() < kLeastKnown) return 0;
  const Worker& known = it->second;
  const double slope = known.Slope();
  std::vector<double> rest;
  for (size_t i = 0; i < known.known(); ++i)
    rest.push_back(known.with_prompts[i].added_s - slope * known.with_prompts[i].uncorrected_s);
  return std::max(0.0, MedianOf(std::move(rest)));
}

double StreamPace::Unexplained(WorkerId worker, double prompts_s, double added_s) const {
  const auto known = workers_.find(worker);
  if (known == workers_.end() || known->second.known() < kLeastKnown) return std::max(0.0, added_s - prompts_s);
  return std::min(StepSeconds(worker), added_s);
}

bool StreamPace::TakesPrompts(WorkerId worker, const ChunkTime& time) {
  const auto known = workers_.find(worker);
  if (known == workers_.end()) return true;
  double& owed_s = known->second.owed_s;
  if (!time.takes_turns()) owed_s = 0;
  if (owed_s <= 0) return true;
  owed_s -= time.bear_s;
  return false;
}

void StreamPace::TookPrompts(WorkerId worker, const ChunkTime& time, double prompts_s) {
  if (!time.takes_turns()) return;
  double& owed_s = workers_[worker].owed_s;
  owed_s = std::min(owed_s + time.step_s + prompts_s - time.bear_s, kMostSkipped * time.bear_s);
}

}  // namespace dovetail::scheduler
