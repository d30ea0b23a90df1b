#include "plan/planner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/statistics.h"
#include "plan/layouts.h"

namespace dovetail::plan {
namespace {

constexpr double kWaitsForKv = 0.2;  // of the steps: then room for K and V binds
constexpr int kHalvings = 5;         // of the interval in which the most load lies

Outcome::Percentiles PercentilesOf(const std::vector<double>& values) {
  return {Percentile(values, 50), Percentile(values, 90), Percentile(values, 99), Mean(values)};
}

// What was simulated of one replica or of several.
struct Sum {
  std::vector<RequestTimes> requests;
  SimulationResult all;
  int replicas = 0;

  void Add(SimulationResult result) {
    requests.insert(requests.end(), result.requests.begin(), result.requests.end());
    all.begin_s = replicas == 0 ? result.begin_s : std::min(all.begin_s, result.begin_s);
    all.end_s = std::max(all.end_s, result.end_s);
    all.steps += result.steps;
    all.step_seconds += result.step_seconds;
    all.parts.Add(result.parts);
    all.compute_busy += result.compute_busy;
    all.attention_busy += result.attention_busy;
    all.most_kv_usage = std::max(all.most_kv_usage, result.most_kv_usage);
    all.waiting_for_kv = std::max(all.waiting_for_kv, result.waiting_for_kv);
    all.preemptions += result.preemptions;
    all.stopped = all.stopped || result.stopped;
    ++replicas;
  }
};

Outcome OutcomeOf(const Sum& sum, const Slo& slo, size_t request_count) {
  Outcome out;
  std::vector<double> ttft, tpot, e2el;
  double input = 0, output = 0, good_output = 0;
  size_t good = 0;
  for (const RequestTimes& times : sum.requests) {
    if (!times.finished) continue;
    ttft.push_back(times.ttft_s);
    e2el.push_back(times.latency_s);
    if (times.output > 1) tpot.push_back(times.tpot_s());
    input += static_cast<double>(times.input);
    output += static_cast<double>(times.output);
    if (!slo.Holds(times)) continue;
    ++good;
    good_output += static_cast<double>(times.output);
  }
  out.ttft = PercentilesOf(ttft);
  out.tpot = PercentilesOf(tpot);
  out.e2el = PercentilesOf(e2el);
  const SimulationResult& all = sum.all;
  if (all.seconds() > 0) out.throughput = {input / all.seconds(), output / all.seconds(), good_output / all.seconds()};
  out.good_share = static_cast<double>(good) / static_cast<double>(request_count);
  out.stopped = all.stopped;
  out.steps = all.steps;
  out.step_s = all.steps > 0 ? all.step_seconds / static_cast<double>(all.steps) : 0;
  out.parts = all.parts;
  out.compute_busy = all.compute_busy / sum.replicas;
  out.attention_busy = all.attention_busy / sum.replicas;
  out.most_kv_usage = all.most_kv_usage;
  out.waiting_for_kv = all.waiting_for_kv;
  out.preemptions = all.preemptions;
  return out;
}

class Planner {
 public:
  explicit Planner(const PlanInput& input) : input_(input) {
    const auto last = [](const SimulatedRequest& request) { return request.at_s; };
    at_once_ = last(input.requests.back()) <= last(input.requests.front());
  }

  absl::StatusOr<Plan> Make() {
    Plan plan;
    DT_ASSIGN_OR_RETURN(plan.tried, ListLayouts(input_));
    const auto dear = [&](const LayoutPlan& one) {
      return input_.budget.has_value() && Usd(one) > *input_.budget && input_.only.empty();
    };
    plan.over_budget = std::erase_if(plan.tried, dear);
    std::vector<LayoutPlan> tried;
    bool found[2] = {false, false};  // by LayoutPlan::split
    for (LayoutPlan& one : plan.tried) {
      // With given arrivals all layouts make the same tokens: the first that meets the SLO is the cheapest.
      if (input_.only.empty() && !at_once_ && found[one.split]) {
        ++plan.left_out;
        continue;
      }
      DT_RETURN_IF_ERROR(Try(one));
      found[one.split] = found[one.split] || one.meets;
      tried.push_back(std::move(one));
    }
    plan.tried = std::move(tried);
    plan.best_whole = Cheapest(plan.tried, false);
    plan.best_split = Cheapest(plan.tried, true);
    for (const auto& best : {plan.best_whole, plan.best_split}) {
      if (!best.has_value()) continue;
      DT_RETURN_IF_ERROR(Tune(plan.tried[*best]));
      DT_RETURN_IF_ERROR(FindMostLoad(plan.tried[*best]));
      if (!plan.best.has_value() || Dollars(plan.tried[*best]) < Dollars(plan.tried[*plan.best])) plan.best = best;
    }
    if (plan.best_whole.has_value() && plan.best_split.has_value()) {
      DT_ASSIGN_OR_RETURN(plan.break_even, Compare(plan.tried[*plan.best_whole], plan.tried[*plan.best_split]));
    }
    return plan;
  }

 private:
  double Usd(const LayoutPlan& one) const { return input_.price == PriceOf::kLow ? one.usd_low : one.usd_high; }
  // Of a million output tokens.
  double Dollars(const LayoutPlan& one) const {
    return (input_.price == PriceOf::kLow ? one.low : one.high).output_usd.value_or(INFINITY);
  }

  std::optional<size_t> Cheapest(const std::vector<LayoutPlan>& all, bool split) const {
    std::optional<size_t> best;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].split == split && all[i].meets && (!best.has_value() || Dollars(all[i]) < Dollars(all[*best])))
        best = i;
    return best;
  }

  absl::Status Try(LayoutPlan& one) const {
    DT_ASSIGN_OR_RETURN(const std::optional<Shape> shape, ShapeOf(input_, one));
    if (!shape.has_value()) return absl::OkStatus();  // LayoutPlan::impossible says why
    for (const int micro_batches : one.split ? std::vector{1, 2} : std::vector{1}) {
      LayoutPlan attempt = one;
      attempt.setting.micro_batches = micro_batches;
      DT_RETURN_IF_ERROR(Run(*shape, attempt));
      if (micro_batches == 1 || IsBetter(attempt, one)) one = std::move(attempt);
    }
    return absl::OkStatus();
  }

  static bool IsBetter(const LayoutPlan& a, const LayoutPlan& b) {
    if (a.impossible.empty() != b.impossible.empty()) return a.impossible.empty();
    if (a.meets != b.meets) return a.meets;
    if (std::abs(a.outcome.good_share - b.outcome.good_share) > 1e-9)
      return a.outcome.good_share > b.outcome.good_share;
    return a.outcome.e2el.mean < b.outcome.e2el.mean;
  }

  // All settings of a layout that meets the SLO already.
  absl::Status Tune(LayoutPlan& one) const {
    if (!one.split) return absl::OkStatus();
    DT_ASSIGN_OR_RETURN(const std::optional<Shape> shape, ShapeOf(input_, one));
    for (const Setting& setting : SettingsOf(*shape)) {
      LayoutPlan attempt = one;
      attempt.setting = setting;
      DT_RETURN_IF_ERROR(Run(*shape, attempt));
      if (IsBetter(attempt, one)) one = std::move(attempt);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Sum> Simulated(const Shape& shape, const Setting& setting, std::span<const SimulatedRequest> requests,
                                bool stop_early) const {
    const double may_miss = (1 - input_.slo.share) * static_cast<double>(requests.size());
    double missed = 0;
    std::function<bool(const RequestTimes&)> hopeless;
    if (stop_early)
      hopeless = [&](const RequestTimes& times) {
        missed += input_.slo.Holds(times) ? 0 : 1;
        return missed > may_miss + 1e-9;
      };
    Sum sum;
    for (int replica = 0; replica < shape.replicas; ++replica) {
      std::vector<SimulatedRequest> own;
      for (size_t i = static_cast<size_t>(replica); i < requests.size(); i += static_cast<size_t>(shape.replicas))
        own.push_back(requests[i]);
      if (own.empty()) continue;
      DT_ASSIGN_OR_RETURN(SimulationResult result,
                          Simulate(shape.steps, ClusterOf(input_, shape, setting), own, hopeless));
      sum.Add(std::move(result));
      if (sum.all.stopped) break;
    }
    return sum;
  }

  absl::Status Run(const Shape& shape, LayoutPlan& one) const {
    const bool stop_early = input_.only.empty();
    auto sum = Simulated(shape, one.setting, input_.requests, stop_early);
    if (absl::IsFailedPrecondition(sum.status())) {
      one.impossible = std::string(sum.status().message());
      return absl::OkStatus();
    }
    DT_RETURN_IF_ERROR(sum.status());
    one.outcome = OutcomeOf(*sum, input_.slo, input_.requests.size());
    one.meets = !one.outcome.stopped && one.outcome.good_share >= input_.slo.share - 1e-9;
    one.binds = one.outcome.waiting_for_kv > kWaitsForKv || one.outcome.preemptions > 0
                    ? "KV capacity"
                    : NameOf(LargestOf(one.outcome.parts));
    DT_ASSIGN_OR_RETURN(
        one.low, CostOf(one.layout, one.outcome.throughput, input_.catalogue, PriceOf::kLow, input_.utilization));
    DT_ASSIGN_OR_RETURN(
        one.high, CostOf(one.layout, one.outcome.throughput, input_.catalogue, PriceOf::kHigh, input_.utilization));
    return absl::OkStatus();
  }

  // Output tokens/s if the load comes `times` as fast; nothing if that is too fast.
  absl::StatusOr<std::optional<double>> AtLoad(const Shape& shape, const LayoutPlan& one, double times) const {
    std::vector<SimulatedRequest> requests = input_.requests;
    for (SimulatedRequest& request : requests) request.at_s /= times;
    DT_ASSIGN_OR_RETURN(const Sum sum, Simulated(shape, one.setting, requests, true));
    const Outcome outcome = OutcomeOf(sum, input_.slo, requests.size());
    if (outcome.stopped || outcome.good_share < input_.slo.share - 1e-9) return std::optional<double>();
    return std::optional<double>(outcome.throughput.output_tokens_s);
  }

  absl::Status FindMostLoad(LayoutPlan& one) const {
    one.most_load = 1;
    one.most_output_tokens_s = one.outcome.throughput.output_tokens_s;
    if (at_once_) return absl::OkStatus();
    DT_ASSIGN_OR_RETURN(const std::optional<Shape> shape, ShapeOf(input_, one));
    double too_much = 0;
    while (too_much == 0 && one.most_load < kMostLoad) {
      DT_ASSIGN_OR_RETURN(const auto tokens_s, AtLoad(*shape, one, 2 * one.most_load));
      if (!tokens_s.has_value()) {
        too_much = 2 * one.most_load;
        break;
      }
      one.most_load *= 2;
      one.most_output_tokens_s = *tokens_s;
    }
    for (int i = 0; i < kHalvings && too_much > 0; ++i) {
      const double middle = (one.most_load + too_much) / 2;
      DT_ASSIGN_OR_RETURN(const auto tokens_s, AtLoad(*shape, one, middle));
      if (tokens_s.has_value()) one.most_output_tokens_s = *tokens_s;
      (tokens_s.has_value() ? one.most_load : too_much) = middle;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<BreakEven> Compare(const LayoutPlan& whole, const LayoutPlan& split) const {
    const auto made = [](const LayoutPlan& one) { return Throughput{0, one.most_output_tokens_s, std::nullopt}; };
    BreakEven out;
    for (const PriceOf price : {PriceOf::kLow, PriceOf::kHigh}) {
      DT_ASSIGN_OR_RETURN(
          (price == PriceOf::kLow ? out.ratio_low : out.ratio_high),
          BreakEvenRatio(whole.layout, made(whole), split.layout, made(split), input_.catalogue, price));
      DT_ASSIGN_OR_RETURN((price == PriceOf::kLow ? out.prices_low : out.prices_high),
                          PriceRatio(split.layout, input_.catalogue, price));
    }
    return out;
  }

  const PlanInput& input_;
  bool at_once_ = false;
};

}  // namespace

bool Slo::Holds(const RequestTimes& times) const {
  return (!ttft_s.has_value() || times.ttft_s <= *ttft_s) && (!tpot_s.has_value() || times.tpot_s() <= *tpot_s) &&
         (!e2el_s.has_value() || times.latency_s <= *e2el_s);
}

absl::StatusOr<Plan> MakePlan(const PlanInput& input) {
  if (input.devices.empty()) return InvalidArgument("plan: there is no device");
  if (input.requests.empty()) return InvalidArgument("plan: there is no request");
  return Planner(input).Make();
}

}  // namespace dovetail::plan
