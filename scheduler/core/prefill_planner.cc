#include "scheduler/core/prefill_planner.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "scheduler/core/prefill_plan.h"

namespace dovetail::scheduler {
namespace {

constexpr double kMicrosecond = 1e-6;
// Steps with fewer tokens say little about prompts.
constexpr int64_t kLeastTokens = 64;
// So many earlier tokens cost as much as the dense layers that their number does not matter.
constexpr double kEvenCuts = 1e9;
// More ranks must be so much faster, for they keep others waiting.
constexpr double kWorthMoreRanks = 0.97;
// One more group still more: what ranks do once a group is not predicted, and rates are not exact.
constexpr double kWorthMoreGroups = 0.92;
constexpr double kLeastCorrection = 0.25, kMostCorrection = 8;
// A way that was not taken for so many parts of prompts is corrected half as much, so that it is tried again.
constexpr double kCorrectionHalves = 16;
// Rates of a worker that was in none of so many steps are taken for those of the others: it is tried again, too.
constexpr uint64_t kRatesLast = 64;

double FlopsOfPair(const proto::AttentionTable& table) {
  double flops = 0;
  for (int group = 0; group < table.group_count(); ++group) {
    const proto::SoftmaxSpec& spec = table.views[group];
    if (!spec.linear() && spec.window == 0)
      flops += table.ops_in_group[group] * proto::AttentionFlops(1, spec.query_heads, spec);
  }
  return flops;
}

template <typename Workers, typename Get>
std::optional<double> MedianOf(const Workers& workers, Get get) {
  std::vector<double> known;
  for (const auto& [id, worker] : workers)
    if (const std::optional<double> rate = get(worker).usual()) known.push_back(*rate);
  if (known.empty()) return std::nullopt;
  const auto middle = known.begin() + static_cast<std::ptrdiff_t>((known.size() - 1) / 2);
  std::nth_element(known.begin(), middle, known.end());
  return *middle;
}

}  // namespace

absl::InlinedVector<WorkerId, 4> AttentionWorkersOf(const proto::Placement& placement) {
  absl::InlinedVector<WorkerId, 4> workers;
  for (const proto::Shard& shard : placement)
    if (std::find(workers.begin(), workers.end(), shard.worker) == workers.end()) workers.push_back(shard.worker);
  return workers;
}

// All of them have said that they have it, and reach each other.
bool PrefillPlanner::MayGive(std::span<const FreeRank> ranks, bool Compute::*what) const {
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto known = compute_.find(ranks[r].worker);
    if (known == compute_.end() || !(known->second.*what)) return false;
    for (size_t other = 0; other < r; ++other)
      if (!linked_.contains(std::minmax(ranks[other].worker, ranks[r].worker))) return false;
  }
  return ranks.size() > 1;
}

// Those through the attention workers first: of ways that are predicted alike the first is taken.
std::vector<proto::PrefillWay> PrefillPlanner::Ways(std::span<const FreeRank> ranks) const {
  using proto::LinearExchange, proto::PrefixExchange;
  const bool group = ranks.size() > 1, softmax = HasSoftmax(table_);
  std::vector<PrefixExchange> exchanges = {PrefixExchange::kAsk};
  if (options_.exchange) {
    // Linear layers alone may be switched, too.
    const bool between = softmax || options_.exchange == PrefixExchange::kSwitch;
    exchanges = {proto::ExchangeOf(*options_.exchange, group && between ? 2 : 1)};
  } else if (softmax) {
    exchanges.push_back(PrefixExchange::kGather);
    if (MayGive(ranks, &Compute::gives_rows)) exchanges.push_back(PrefixExchange::kGatherDirect);
    if (MayGive(ranks, &Compute::passes_on_rows)) exchanges.push_back(PrefixExchange::kRing);
    const bool enough_heads = static_cast<int>(ranks.size()) <= proto::MostSwitchRanks(table_);
    if (enough_heads && MayGive(ranks, &Compute::switches_heads)) exchanges.push_back(PrefixExchange::kSwitch);
  }
  const bool linear = group && table_.has_linear();
  const bool chains =
      linear && (options_.linear ? IsBetweenRanks(*options_.linear) : MayGive(ranks, &Compute::gives_states));
  // In a switch ranks wait for each other in every layer, so those of a chain would run one after the other.
  const bool switches = linear && static_cast<int>(ranks.size()) <= proto::MostLinearSwitchRanks(table_) &&
                        (options_.linear ? *options_.linear == LinearExchange::kSwitch : chains);
  std::vector<proto::PrefillWay> ways;
  for (const PrefixExchange exchange : exchanges) {
    // Where ranks give each other one thing, they give each other all they can.
    const bool all = chains && (options_.linear || IsBetweenRanks(exchange));
    if (!all) ways.push_back({exchange, LinearExchange::kStates});
    const bool switched = switches && exchange == PrefixExchange::kSwitch;
    if (chains) ways.push_back({exchange, switched ? LinearExchange::kSwitch : LinearExchange::kChain});
  }
  return ways;
}

std::optional<ComputeRates> PrefillPlanner::RatesOf(WorkerId worker, bool in_pair) const {
  const auto known = compute_.find(worker);
  ComputeRates rates = compute_rates();  // what is not known of it is as of the others
  if (known != compute_.end() && learnt_ - known->second.learnt < kRatesLast) {
    if (const auto token = known->second.token.now()) rates.token_s = token;
    if (const auto flop = known->second.flop.now()) rates.flop_s = flop;
    if (!rates.flop_s && known->second.scratch_blocks == 0) rates.flop_s = 0;  // attention workers attend all
  }
  if ((in_pair || FlopsOfPair(table_) == 0) && !rates.flop_s) rates.flop_s = 0;
  if (!rates.token_s || !rates.flop_s) return std::nullopt;
  return rates;
}

// The slowest of them bounds a step that all of them answer.
PlaneRates PrefillPlanner::RatesOf(std::span<const WorkerId> attention_workers) const {
  PlaneRates slowest;
  const auto slower = [](std::optional<double>& so_far, std::optional<double> rate) {
    if (rate && (!so_far || *rate > *so_far)) so_far = rate;
  };
  for (const WorkerId worker : attention_workers) {
    const auto known = plane_.find(worker);
    if (known == plane_.end()) continue;
    slower(slowest.flop_s, known->second.flop.usual());
    slower(slowest.byte_s, known->second.byte.usual());
  }
  const PlaneRates all = plane_rates();
  if (!slowest.flop_s) slowest.flop_s = all.flop_s;
  if (!slowest.byte_s) slowest.byte_s = all.byte_s;
  return slowest;
}

// The slowest of the links by which the ranks before it give it something.
std::optional<double> PrefillPlanner::LinkRateOf(std::span<const FreeRank> before, WorkerId rank) const {
  std::optional<double> slowest;
  for (const FreeRank& from : before) {
    const auto known = link_bytes_.find({from.worker, rank});
    const auto rate = known == link_bytes_.end() ? std::nullopt : known->second.usual();
    if (rate && (!slowest || *rate > *slowest)) slowest = rate;
  }
  return slowest ? slowest : link_byte_s();
}

std::optional<double> PrefillPlanner::link_byte_s() const {
  return MedianOf(link_bytes_, [](const RateEstimator& link) -> const RateEstimator& { return link; });
}

void PrefillPlanner::Link(WorkerId one, WorkerId other, bool linked) {
  if (linked)
    linked_.insert(std::minmax(one, other));
  else
    linked_.erase(std::minmax(one, other));
}

void PrefillPlanner::ForgetComputeWorker(WorkerId worker) {
  const auto has = [&](const auto& ends) { return ends.first == worker || ends.second == worker; };
  compute_.erase(worker);
  std::erase_if(linked_, has);
  std::erase_if(link_bytes_, [&](const auto& link) { return has(link.first); });
}

ComputeRates PrefillPlanner::compute_rates() const {
  return {MedianOf(compute_, [](const Compute& worker) -> const RateEstimator& { return worker.token; }),
          MedianOf(compute_, [](const Compute& worker) -> const RateEstimator& { return worker.flop; })};
}

PlaneRates PrefillPlanner::plane_rates() const {
  return {MedianOf(plane_, [](const Plane& worker) -> const RateEstimator& { return worker.flop; }),
          MedianOf(plane_, [](const Plane& worker) -> const RateEstimator& { return worker.byte; })};
}

PromptStep PrefillPlanner::StepOf(const PromptToPlan& prompt, const FreeRank& rank, const RankTokens& tokens,
                                  proto::PrefixExchange exchange) const {
  const auto known = compute_.find(rank.worker);
  return {.ctx_len = tokens.begin,
          .base = tokens.base,
          .tokens = tokens.end - tokens.begin,
          .group_end = tokens.given_back_to,
          .exchange = exchange,
          .held = rank.held,
          .scratch_blocks = known == compute_.end() ? UINT32_MAX : known->second.scratch_blocks,
          .given_back = tokens.given_back_to > 0,
          .last = tokens.end >= prompt.end};
}

HeldTokens PrefillPlanner::HeldAfter(const PromptToPlan& prompt, const FreeRank& rank, const RankTokens& tokens,
                                     proto::PrefixExchange exchange) const {
  if (prompt.pair == rank.worker) return {};
  // These drop what they had, and keep nothing.
  if (exchange == proto::PrefixExchange::kSwitch || exchange == proto::PrefixExchange::kPassQ) return {};
  return WorkOf(table_, StepOf(prompt, rank, tokens, exchange)).held;
}

// Where the prompt goes on, and a rank has room for what later ones would give it.
bool PrefillPlanner::GivesBack(const PromptToPlan& prompt, std::span<const FreeRank> ranks,
                               std::span<const Position> cuts, const proto::PrefillWay& by) const {
  if (by.softmax != proto::PrefixExchange::kGatherDirect || cuts.back() >= prompt.end) return false;
  for (size_t r = 0; r + 2 < cuts.size(); ++r) {
    const RankTokens tokens{cuts.front(), cuts[r], cuts[r + 1], cuts.back()};
    if (HeldAfter(prompt, ranks[r], tokens, by.softmax).end == cuts.back()) return true;
  }
  return false;
}

// What a way for more ranks is for as many as a part of a prompt has.
proto::PrefillWay PrefillPlanner::WayOf(const Way& way, int ranks) {
  return {proto::ExchangeOf(way.by.softmax, ranks), ranks < 2 ? proto::LinearExchange::kStates : way.by.linear};
}

double PrefillPlanner::CorrectionOf(const Way& way) const {
  const auto known = corrections_.find(way);
  if (known == corrections_.end()) return 1;
  const double ratio = std::clamp(known->second.ratio.usual().value_or(1), kLeastCorrection, kMostCorrection);
  const auto parts_ago = static_cast<double>(measured_ - known->second.measured);
  return std::pow(ratio, std::exp2(-parts_ago / kCorrectionHalves));
}

// Of one that sees so many others.
double PrefillPlanner::SecondsOfToken(const ComputeRates& rates, const PlaneRates& plane,
                                      proto::PrefixExchange exchange, double seen) const {
  const double here = rates.flop_s.value_or(0);
  const double attends = exchange == proto::PrefixExchange::kAsk ? plane.flop_s.value_or(here) : here;
  return rates.token_s.value_or(0) + seen * FlopsOfPair(table_) * attends;
}

// They keep the order of `free`, so that from step to step a worker is the same rank.
PrefillPlanner::Ranks PrefillPlanner::FastestOf(std::span<const FreeRank> free, int count,
                                                std::span<const ComputeRates> rates) const {
  Ranks ranks;
  for (size_t i = 0; i < rates.size(); ++i) ranks.index.push_back(i);
  const auto seconds = [&](size_t i) { return SecondsOfToken(rates[i], {}, proto::PrefixExchange::kGather, 1024); };
  std::stable_sort(ranks.index.begin(), ranks.index.end(), [&](size_t a, size_t b) { return seconds(a) < seconds(b); });
  ranks.index.resize(static_cast<size_t>(count));
  std::sort(ranks.index.begin(), ranks.index.end());
  for (const size_t i : ranks.index) {
    ranks.free.push_back(free[i]);
    ranks.rates.push_back(rates[i]);
    const std::span<const FreeRank> all = ranks.free;
    ranks.rates.back().link_byte_s = LinkRateOf(all.first(all.size() - 1), free[i].worker);
  }
  return ranks;
}

// Of what is left from `base` on.
int PrefillPlanner::RanksFrom(const PromptToPlan& prompt, Position base, int most_ranks) const {
  const Position whole = std::max(prompt.end - prompt.ctx_len, prompt.divided);
  return scheduler::RanksFor(prompt.end - base, whole, options_.rank_tokens, options_.max_step_tokens, most_ranks);
}

int PrefillPlanner::StepTokensOf(const PromptToPlan& prompt) const {
  return prompt.most_tokens == 0 ? options_.max_step_tokens : std::min(options_.max_step_tokens, prompt.most_tokens);
}

std::vector<Position> PrefillPlanner::CutsOf(const PromptToPlan& prompt, Position base, const Way& way,
                                             std::span<const ComputeRates> rates, const PlaneRates& plane,
                                             int more_groups) const {
  const int ranks = options_.max_step_tokens < kSegmentTokens ? 1 : RanksFrom(prompt, base, way.ranks);
  const int step_tokens = StepTokensOf(prompt);
  if (ranks < 2) return {base, std::min(prompt.end, base + step_tokens)};
  PrefillCutOptions cut{.most_tokens = step_tokens, .more_groups = more_groups};
  // With pass-q the first rank attends to least for itself, and to most for others.
  const bool asks = way.by.softmax == proto::PrefixExchange::kPassQ;
  if (asks) cut.par_tokens = kEvenCuts;
  std::vector<double> speeds;
  if (!rates.empty()) {
    // How many earlier tokens cost as much as the dense layers: by what attends to them.
    const double dense_s = SecondsOfToken(rates[0], plane, way.by.softmax, 0);
    const double pair_s = SecondsOfToken(rates[0], plane, way.by.softmax, 1) - dense_s;
    if (dense_s > 0 && pair_s > 0) cut.par_tokens = std::clamp(dense_s / pair_s, double{kSegmentTokens}, 1e9);
    // Heads are divided whatever the cuts: these are for the dense layers alone.
    const bool switches = way.by.softmax == proto::PrefixExchange::kSwitch;
    if (switches || asks) cut.par_tokens = kEvenCuts;
    const Position most = Position{ranks} * step_tokens;
    const auto seen = switches ? 0 : static_cast<double>(base + std::min(prompt.end, base + most)) / 2;
    for (int r = 0; r < ranks; ++r) {
      const double seconds = SecondsOfToken(rates[static_cast<size_t>(r)], plane, way.by.softmax, seen);
      speeds.push_back(seconds > 0 ? 1 / seconds : 1);
    }
    cut.speeds = speeds;
  }
  return CutPrefill(base, EndOfGroup(base, prompt.end, ranks, cut), ranks, cut);
}

// Where a rank has all that a step may have, its fair part may be more: then the others have more than theirs, and it
// waits for them.
double PrefillPlanner::BestTimeTo(Position horizon, const PromptToPlan& prompt, const Ranks& ranks, const Way& way,
                                  PrefillChoice& first) const {
  const double seconds = TimeTo(horizon, prompt, ranks, way, /*more_groups=*/0, first);
  bool full = false;
  for (int r = 0; r < first.ranks(); ++r)
    full |= first.cuts[r + 1] - first.cuts[r] > StepTokensOf(prompt) - kSegmentTokens;
  if (first.ranks() < 2 || !full) return seconds;
  PrefillChoice smaller;
  const double smaller_s = TimeTo(horizon, prompt, ranks, way, /*more_groups=*/1, smaller);
  if (smaller.ranks() < first.ranks() || smaller_s >= seconds * kWorthMoreGroups) return seconds;
  first = std::move(smaller);
  return smaller_s;
}

double PrefillPlanner::TimeTo(Position horizon, const PromptToPlan& prompt, Ranks ranks, const Way& way,
                              int more_groups, PrefillChoice& first) const {
  const PlaneRates plane = RatesOf(prompt.attention_workers);
  const double correction = CorrectionOf(way);
  double seconds = 0;
  for (Position base = prompt.ctx_len; base < horizon;) {
    const std::vector<Position> cuts = CutsOf(prompt, base, way, ranks.rates, plane, more_groups);
    more_groups = 0;  // the others are as few as they can be
    const proto::PrefillWay by = WayOf(way, static_cast<int>(cuts.size()) - 1);
    const bool gives_back = GivesBack(prompt, ranks.free, cuts, by);
    std::vector<StepWork> work;
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      const RankTokens tokens{base, cuts[r], cuts[r + 1], gives_back ? cuts.back() : 0};
      PromptStep one = StepOf(prompt, ranks.free[r], tokens, by.softmax);
      one.chained = r > 0 && by.linear == proto::LinearExchange::kChain;
      one.switched = by.linear == proto::LinearExchange::kSwitch;
      one.group_end = cuts.back();
      one.rank = static_cast<int>(r);
      one.ranks = static_cast<int>(cuts.size()) - 1;
      one.cuts = cuts;
      one.link_by_pair = true;
      work.push_back(WorkOf(table_, one));
      ranks.free[r].held = work.back().held;
    }
    const Prediction step = Predict(work, ranks.rates, plane);
    if (base == prompt.ctx_len) {
      first.cuts = cuts;
      first.gives_back = gives_back;
      first.free_rank.assign(ranks.index.begin(), ranks.index.begin() + first.ranks());
      first.forecast = {.ranks = first.ranks(),
                        .tokens = cuts.back() - cuts.front(),
                        .exchange = by.softmax,
                        .linear = by.linear,
                        .predicted_s = step.seconds * correction,
                        .bound = step.bound};
    }
    // Of the last step, as much as lies before the horizon.
    const double part = std::min(1.0, static_cast<double>(horizon - base) / static_cast<double>(cuts.back() - base));
    seconds += step.seconds * correction * part;
    base = cuts.back();
  }
  return seconds;
}

// All that may be, by the first way that may be.
PrefillChoice PrefillPlanner::WithoutRates(const PromptToPlan& prompt, std::span<const FreeRank> free) const {
  const Way way{static_cast<int>(free.size()), Ways(free)[0]};
  PrefillChoice choice{.cuts = CutsOf(prompt, prompt.ctx_len, way, {}, {}), .free_rank = {}, .forecast = {}};
  for (int r = 0; r < choice.ranks(); ++r) choice.free_rank.push_back(static_cast<size_t>(r));
  const proto::PrefillWay by = WayOf(way, choice.ranks());
  choice.forecast = {.ranks = choice.ranks(),
                     .tokens = choice.cuts.back() - prompt.ctx_len,
                     .exchange = by.softmax,
                     .linear = by.linear};
  choice.gives_back = GivesBack(prompt, free, choice.cuts, by);
  return choice;
}

// With a head switch that is asked for, each rank has a KV head.
int PrefillPlanner::MostRanks() const {
  const bool switches = options_.exchange == proto::PrefixExchange::kSwitch && HasSoftmax(table_);
  return switches ? proto::MostSwitchRanks(table_) : proto::kMaxPrefillRanks;
}

PrefillChoice PrefillPlanner::Choose(const PromptToPlan& prompt, std::span<const FreeRank> free, int most_ranks) const {
  DT_CHECK(prompt.ctx_len < prompt.end && most_ranks >= 1 && static_cast<size_t>(most_ranks) <= free.size(),
           "nothing to plan");
  most_ranks = std::min(most_ranks, MostRanks());
  std::vector<ComputeRates> rates;
  for (const FreeRank& rank : free)
    if (const auto known = RatesOf(rank.worker)) rates.push_back(*known);
  if (rates.size() < free.size()) return WithoutRates(prompt, free.first(static_cast<size_t>(most_ranks)));
  const Position horizon = std::min(prompt.end, prompt.ctx_len + Position{most_ranks} * StepTokensOf(prompt));
  PrefillChoice best;
  double best_s = 0, second_s = 0;
  for (int ranks = options_.choose_ranks ? 1 : most_ranks; ranks <= most_ranks; ++ranks) {
    const Ranks fastest = FastestOf(free, ranks, rates);
    for (const proto::PrefillWay& by : Ways(fastest.free)) {
      PrefillChoice choice;
      const double seconds = BestTimeTo(horizon, prompt, fastest, {ranks, by}, choice);
      if (options_.choose_ranks && choice.ranks() < ranks) continue;  // the prompt is too short for them
      const bool more = ranks > best.ranks();
      const bool better = best.cuts.empty() || seconds < best_s * (more ? kWorthMoreRanks : 1);
      const double other_s = better ? best_s : seconds;
      if (other_s > 0 && (second_s == 0 || other_s < second_s)) second_s = other_s;
      if (!better) continue;
      best = std::move(choice);
      best_s = seconds;
    }
  }
  if (best_s > 0 && second_s > 0) best.forecast.next_best_s = best.forecast.predicted_s * second_s / best_s;
  return best;
}

PrefillForecast PrefillPlanner::ChooseExchange(const PromptToPlan& prompt, const FreeRank& rank, int tokens) const {
  const bool in_pair = prompt.pair == rank.worker;
  std::vector<proto::PrefillWay> ways = Ways({&rank, 1});
  if (in_pair) ways = {{proto::PrefixExchange::kAsk, proto::LinearExchange::kStates}};
  PrefillForecast forecast{.ranks = 1, .tokens = tokens, .exchange = ways[0].softmax};
  const auto rates = RatesOf(rank.worker, in_pair);
  if (!rates) return forecast;
  const PlaneRates plane = RatesOf(prompt.attention_workers);
  for (const proto::PrefillWay& by : ways) {
    const proto::PrefixExchange exchange = by.softmax;
    PromptStep one = StepOf(prompt, rank, {prompt.ctx_len, prompt.ctx_len, prompt.ctx_len + tokens}, exchange);
    if (in_pair) one.scratch_blocks = 0;
    const StepWork work = WorkOf(table_, one);
    if (exchange != ways[0].softmax && work.exchange != exchange) continue;  // nothing is missing, or there is no room
    const Prediction step = Predict({&work, 1}, {&*rates, 1}, plane);
    const double seconds = step.seconds * CorrectionOf({1, by});
    if (forecast.predicted_s > 0 && seconds >= forecast.predicted_s) {
      forecast.next_best_s = seconds;
      continue;
    }
    forecast.next_best_s = forecast.predicted_s;
    forecast.predicted_s = seconds;
    forecast.exchange = exchange;
    forecast.bound = step.bound;
  }
  return forecast;
}

double PrefillPlanner::SecondsAlone(WorkerId worker, Position begin, Position end, bool in_pair) const {
  const auto rates = RatesOf(worker, in_pair);
  if (!rates || begin >= end) return 0;
  const double seen = static_cast<double>(begin + end) / 2;
  const auto known = compute_.find(worker);
  const bool elsewhere = in_pair || (known != compute_.end() && known->second.scratch_blocks == 0);
  const double token_s = elsewhere ? SecondsOfToken(*rates, plane_rates(), proto::PrefixExchange::kAsk, seen)
                                   : SecondsOfToken(*rates, {}, proto::PrefixExchange::kGather, seen);
  return static_cast<double>(end - begin) * token_s;
}

void PrefillPlanner::Learn(WorkerId compute_worker, std::span<const WorkerId> attention_workers,
                           const proto::StepResult& result, bool follows_a_rank, bool shortened) {
  const proto::PromptWork& work = result.work;
  if (work.tokens < kLeastTokens) return;
  const proto::StepTimings& times = result.timings;
  Compute& compute = compute_[compute_worker];
  compute.scratch_blocks = work.scratch_blocks;
  compute.gives_rows = work.gives_rows;
  compute.passes_on_rows = work.passes_on_rows;
  compute.switches_heads = work.switches_heads;
  compute.gives_states = work.gives_states;
  compute.learnt = ++learnt_;
  if (!shortened || compute.token.measurements() == 0)
    compute.token.Note(static_cast<double>(work.step_tokens),
                       static_cast<double>(times.dense_us + times.linear_us) * kMicrosecond);
  compute.flop.Note(work.here_flops, static_cast<double>(times.prompt_us - times.linear_us) * kMicrosecond);
  for (const proto::RankTransfer& transfer : result.transfers)
    if (compute_.contains(transfer.to))
      link_bytes_[{compute_worker, transfer.to}].Note(static_cast<double>(transfer.bytes),
                                                      static_cast<double>(transfer.busy_us) * kMicrosecond);
  for (const WorkerId worker : attention_workers) {
    Plane& plane = plane_[worker];
    plane.flop.Note(work.asked_flops, static_cast<double>(times.attention_us) * kMicrosecond);
    const int64_t exposed_us = times.attention_wait_us - times.attention_us - times.overlapped_us;
    if (follows_a_rank) continue;
    plane.byte.Note(static_cast<double>(PlaneBytesOf(result.prefix)), static_cast<double>(exposed_us) * kMicrosecond);
  }
}

void PrefillPlanner::LearnCorrection(int ranks, const proto::PrefillWay& by, double predicted_s, double measured_s) {
  const Way way{ranks, by};
  const double uncorrected_s = predicted_s / CorrectionOf(way);  // what was predicted has it in it already
  Correction& correction = corrections_[way];
  correction.ratio.Note(uncorrected_s, measured_s);
  correction.measured = ++measured_;
}

void PrefillPlanner::LearnTime(const PrefillForecast& measured) {
  last_ = measured;
  if (measured.predicted_s <= 0) return;
  LearnCorrection(measured.ranks, measured.way(), measured.predicted_s, measured.measured_s);
  PrefillTimes& times = times_[IndexOf(measured.way())];
  times.predicted_s += measured.predicted_s;
  times.measured_s += measured.measured_s;
  if (measured.next_best_s <= 0) return;
  times.next_best_s += measured.next_best_s;
  times.had_other_s += measured.measured_s;
}

}  // namespace dovetail::scheduler
