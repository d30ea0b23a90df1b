#include "server/cli/plan_curves.h"

#include <algorithm>
#include <utility>

namespace dovetail::cli {
namespace {

using plan::LayoutPlan;
using plan::PlanInput;
using Layouts = std::vector<std::vector<plan::Machines>>;  // without PlanInput::hosts

constexpr double kLoads[] = {0.25, 0.5, 0.75, 1, 1.5, 2, 3};
constexpr double kSlos[] = {0.5, 0.7, 1, 1.5, 2, 4};

absl::StatusOr<AtLoad> RunAt(const PlanInput& input, const Layouts& layouts, double times) {
  PlanInput faster = input;
  faster.only = layouts;
  faster.slo = {};
  // A share that nothing reaches: the planner does not look for the largest load of each.
  faster.slo.ttft_s = 0;
  for (plan::SimulatedRequest& request : faster.requests) request.at_s /= times;
  DT_ASSIGN_OR_RETURN(plan::Plan plan, plan::MakePlan(faster));
  std::erase_if(plan.tried, [](const LayoutPlan& one) { return !one.impossible.empty(); });
  return AtLoad{times, std::move(plan.tried)};
}

absl::StatusOr<std::optional<AtSlo::Cost>> CostAt(const PlanInput& input, const plan::Plan& plan,
                                                  const std::optional<size_t>& best) {
  if (!best.has_value()) return std::optional<AtSlo::Cost>();
  const LayoutPlan& one = plan.tried[*best];
  const plan::Throughput made{0, one.most_output_tokens_s, std::nullopt};
  const auto usd = [&](plan::PriceOf price) {
    return plan::CostOf(one.layout, made, input.catalogue, price, input.utilization);
  };
  DT_ASSIGN_OR_RETURN(const plan::TokenCost low, usd(plan::PriceOf::kLow));
  DT_ASSIGN_OR_RETURN(const plan::TokenCost high, usd(plan::PriceOf::kHigh));
  if (!low.output_usd.has_value() || !high.output_usd.has_value()) return std::optional<AtSlo::Cost>();
  return std::optional<AtSlo::Cost>({*low.output_usd, *high.output_usd});
}

absl::StatusOr<AtSlo> CostsAt(const PlanInput& input, const Layouts& layouts, double times) {
  PlanInput other = input;
  // The same layouts for all limits: looser ones would let in others that cost less an hour and more a token.
  other.only = layouts;
  for (std::optional<double>* limit : {&other.slo.ttft_s, &other.slo.tpot_s, &other.slo.e2el_s})
    if (limit->has_value()) *limit = **limit * times;
  DT_ASSIGN_OR_RETURN(const plan::Plan plan, plan::MakePlan(other));
  AtSlo out;
  out.times = times;
  DT_ASSIGN_OR_RETURN(out.whole, CostAt(other, plan, plan.best_whole));
  DT_ASSIGN_OR_RETURN(out.split, CostAt(other, plan, plan.best_split));
  return out;
}

bool HasLimit(const plan::Slo& slo) {
  return slo.ttft_s.has_value() || slo.tpot_s.has_value() || slo.e2el_s.has_value();
}

}  // namespace

std::vector<size_t> ShownLayouts(const plan::Plan& plan) {
  std::vector<size_t> shown;
  for (const bool split : {false, true}) {
    std::optional<size_t> one = split ? plan.best_split : plan.best_whole;
    for (size_t i = 0; i < plan.tried.size() && !one.has_value(); ++i)
      if (plan.tried[i].split == split && plan.tried[i].impossible.empty()) one = i;
    if (one.has_value()) shown.push_back(*one);
  }
  return shown;
}

absl::StatusOr<PlanCurves> CurvesOf(const PlanInput& input, const plan::Plan& plan) {
  PlanCurves curves;
  Layouts layouts;
  for (const size_t i : ShownLayouts(plan)) {
    layouts.push_back(plan.tried[i].layout.machines);
    layouts.back().resize(layouts.back().size() - input.hosts.size());  // which the planner adds to each
  }
  if (!layouts.empty() && input.requests.back().at_s > input.requests.front().at_s)
    for (const double times : kLoads) {
      DT_ASSIGN_OR_RETURN(AtLoad at, RunAt(input, layouts, times));
      curves.loads.push_back(std::move(at));
    }
  if (!layouts.empty() && HasLimit(input.slo))
    for (const double times : kSlos) {
      DT_ASSIGN_OR_RETURN(const AtSlo at, CostsAt(input, layouts, times));
      curves.slos.push_back(at);
    }
  return curves;
}

}  // namespace dovetail::cli
