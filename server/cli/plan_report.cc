#include "server/cli/plan_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace dovetail::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::LayoutPlan;
using plan::Outcome;
using plan::Plan;
using plan::PlanInput;
using scheduler::PlacementPolicy;

const char* NameOf(PlacementPolicy placement) {
  static constexpr const char* kNames[] = {"request", "heads", "tokens", "mixed", "tiers"};
  return kNames[static_cast<size_t>(placement)];
}

std::string Range(const std::optional<double>& low, const std::optional<double>& high) {
  if (!low.has_value() || !high.has_value()) return "-";
  return *low == *high ? absl::StrFormat("%.3g", *low) : absl::StrFormat("%.3g..%.3g", *low, *high);
}

std::string KvCacheDtypeOf(const PlanInput& input) {
  return plan::KvCacheDtype(input.work.attention.views.front().kv, input.work.kv_storage);
}

std::string SettingText(const PlanInput& input, const LayoutPlan& one) {
  std::string text = absl::StrCat("--kv-cache-dtype ", KvCacheDtypeOf(input));
  if (!one.split) return text;
  absl::StrAppend(&text, ", --micro-batches ", one.setting.micro_batches, ", --placement ",
                  NameOf(one.setting.placement), ", --prefill-ranks ", one.setting.prefill_ranks);
  return text;
}

std::string Line(const LayoutPlan& one, bool best) {
  std::string text =
      absl::StrFormat("%c %-38s %11s", best ? '*' : ' ', one.layout.name, Range(one.usd_low, one.usd_high));
  if (!one.impossible.empty()) return absl::StrCat(text, "  impossible: ", one.impossible, "\n");
  const Outcome& out = one.outcome;
  if (out.stopped)
    return absl::StrCat(text, "  misses the SLO; simulated until that was certain; ", one.binds, " binds\n");
  absl::StrAppendFormat(&text, " %8.0f /%8.0f %7.1f /%7.1f %6.1f%% %9.1f %9.1f %11s  %s\n", 1e3 * out.ttft.p50,
                        1e3 * out.ttft.p99, 1e3 * out.tpot.p50, 1e3 * out.tpot.p99, 100 * out.good_share,
                        out.throughput.input_tokens_s, out.throughput.output_tokens_s,
                        Range(one.low.output_usd, one.high.output_usd), one.binds);
  return text;
}

std::string Details(const PlanInput& input, const LayoutPlan& one) {
  std::string text = absl::StrFormat("%s: %s\n", one.layout.name, SettingText(input, one));
  const double sum = one.outcome.parts.Sum();
  std::vector<std::string> shares;
  for (const auto& [name, seconds] : PartsOf(one.outcome.parts))
    if (sum > 0 && seconds > 0) shares.push_back(absl::StrFormat("%s %.0f %%", name, 100 * seconds / sum));
  absl::StrAppend(&text, "  of a step's time: ", absl::StrJoin(shares, ", "), "\n");
  if (one.split)
    absl::StrAppendFormat(&text, "  busy: compute %.0f %%, attention %.0f %% of the time\n",
                          100 * one.outcome.compute_busy, 100 * one.outcome.attention_busy);
  absl::StrAppendFormat(&text, "  room for K and V: at most %.0f %% taken, %d preemptions\n",
                        100 * one.outcome.most_kv_usage, one.outcome.preemptions);
  if (one.most_load > 0)
    absl::StrAppendFormat(&text, "  meets the SLO up to %s%.3g times this load: %.1f output tokens/s\n",
                          one.most_load >= plan::kMostLoad ? "at least " : "", one.most_load, one.most_output_tokens_s);
  return text;
}

std::string BreakEvenText(const PlanInput&, const Plan& plan) {
  if (!plan.break_even.has_value()) return "";
  const plan::BreakEven& even = *plan.break_even;
  std::string text = absl::StrFormat(
      "break-even: the split pays below P_attention / P_compute = %s, each layout at its largest load\n",
      Range(std::min(even.ratio_low, even.ratio_high), std::max(even.ratio_low, even.ratio_high)));
  if (even.ratio_low <= 0 && even.ratio_high <= 0)
    absl::StrAppend(&text, "  no price of attention devices makes it pay: it makes too few tokens\n");
  absl::StrAppendFormat(
      &text, "  these prices have %s\n",
      Range(std::min(even.prices_low, even.prices_high), std::max(even.prices_low, even.prices_high)));
  for (const plan::KnownRatio& known : plan::kKnownRatios)
    absl::StrAppendFormat(&text, "  %s's ratio: %.2f (%s)\n", known.whose, known.ratio, known.prices);
  return text;
}

double TokensOf(const PlanInput& input, int64_t plan::SimulatedRequest::*field) {
  double sum = 0;
  for (const plan::SimulatedRequest& request : input.requests) sum += static_cast<double>(request.*field);
  return sum;
}

Json PercentilesJson(const Outcome::Percentiles& p) {
  return {{"mean", 1e3 * p.mean}, {"p50", 1e3 * p.p50}, {"p90", 1e3 * p.p90}, {"p99", 1e3 * p.p99}};
}

Json CostJson(const plan::TokenCost& cost) {
  const auto value = [](const std::optional<double>& usd) { return usd.has_value() ? Json(*usd) : Json(nullptr); };
  return {{"usd_per_hour", cost.usd_per_hour},
          {"usd_per_million_input_tokens", value(cost.input_usd)},
          {"usd_per_million_output_tokens", value(cost.output_usd)},
          {"usd_per_million_tokens", value(cost.mixed_usd)},
          {"usd_per_million_output_tokens_within_slo", value(cost.good_output_usd)}};
}

Json LayoutJson(const LayoutPlan& one) {
  Json json = {{"layout", one.layout.name},
               {"split", one.split},
               {"usd_per_hour_low", one.usd_low},
               {"usd_per_hour_high", one.usd_high}};
  if (!one.impossible.empty()) {
    json["impossible"] = one.impossible;
    return json;
  }
  const Outcome& out = one.outcome;
  json["setting"] = {{"micro_batches", one.setting.micro_batches},
                     {"placement", NameOf(one.setting.placement)},
                     {"prefill_ranks", one.setting.prefill_ranks}};
  json["meets_slo"] = one.meets;
  json["stopped_early"] = out.stopped;
  json["share_within_slo"] = out.good_share;
  json["ttft_ms"] = PercentilesJson(out.ttft);
  json["tpot_ms"] = PercentilesJson(out.tpot);
  json["e2el_ms"] = PercentilesJson(out.e2el);
  json["input_tokens_per_s"] = out.throughput.input_tokens_s;
  json["output_tokens_per_s"] = out.throughput.output_tokens_s;
  json["steps"] = {{"count", out.steps}, {"mean_ms", 1e3 * out.step_s}};
  for (const auto& [name, seconds] : PartsOf(out.parts)) json["seconds"][name] = seconds;
  json["binds"] = one.binds;
  json["compute_busy"] = out.compute_busy;
  json["attention_busy"] = out.attention_busy;
  json["most_kv_usage"] = out.most_kv_usage;
  json["preemptions"] = out.preemptions;
  json["low"] = CostJson(one.low);
  json["high"] = CostJson(one.high);
  if (one.most_load > 0) json["at_most"] = {{"load", one.most_load}, {"output_tokens_per_s", one.most_output_tokens_s}};
  return json;
}

Json MeasuredJson(const std::vector<MeasuredLoad>& loads) {
  Json all = Json::array();
  for (const MeasuredLoad& load : loads) {
    Json values = Json::object();
    for (const MeasuredLoad::Value& value : load.values)
      values[value.name] = {{"measured_ms", value.measured_ms}, {"predicted_ms", value.predicted_ms}};
    all.push_back({{"layout", load.layout}, {"result", load.file}, {"values", std::move(values)}});
  }
  return all;
}

}  // namespace

std::vector<std::pair<const char*, double>> PartsOf(const plan::StepParts& parts) {
  return {{"weights", parts.weights_s}, {"arithmetic", parts.arithmetic_s},
          {"prompts", parts.prompts_s}, {"kv_reads", parts.attention_s},
          {"link", parts.link_s},       {"overhead", parts.overhead_s}};
}

std::string LoadText(const PlanInput& input) {
  const double count = static_cast<double>(input.requests.size());
  const double span = input.requests.back().at_s;
  return absl::StrFormat("%d requests of %.0f and %.0f tokens on average, %s", input.requests.size(),
                         TokensOf(input, &plan::SimulatedRequest::input) / count,
                         TokensOf(input, &plan::SimulatedRequest::output) / count,
                         span > 0 ? absl::StrFormat("%.3g a second", count / span) : "all at once");
}

std::string SloText(const plan::Slo& slo) {
  std::vector<std::string> limits;
  const auto add = [&](const char* name, const std::optional<double>& seconds) {
    if (seconds.has_value()) limits.push_back(absl::StrFormat("%s <= %g ms", name, 1e3 * *seconds));
  };
  add("ttft", slo.ttft_s);
  add("tpot", slo.tpot_s);
  add("e2el", slo.e2el_s);
  if (limits.empty()) return "none";
  return absl::StrFormat("%g %% of requests with %s", 100 * slo.share, absl::StrJoin(limits, ", "));
}

std::string PlanTable(const PlanInput& input, const Plan& plan, const std::vector<MeasuredLoad>& measured) {
  std::string text = absl::StrCat(input.work.name, ": ", LoadText(input), "\nSLO: ", SloText(input.slo), "\n");
  for (const plan::PlanDevice& device : input.devices)
    absl::StrAppendFormat(&text, "%s: profile of %s, %d threads, taken under a load of %.1f\n", device.profile.name,
                          device.profile.dated, device.profile.threads, device.profile.load);
  absl::StrAppendFormat(&text, "prices of %s (%s), low..high; under this load for %g %% of the hours\n\n",
                        input.catalogue.name, input.catalogue.dated, 100 * input.utilization);
  absl::StrAppendFormat(&text, "  %-38s %11s %8s /%8s %7s /%7s %7s %9s %9s %11s  %s\n", "predicted", "$/h", "ttft p50",
                        "p99 ms", "tpot", "p99 ms", "in SLO", "in tok/s", "out tok/s", "$/M out", "binds");
  for (size_t i = 0; i < plan.tried.size(); ++i) text += Line(plan.tried[i], plan.best == i);
  if (plan.left_out > 0)
    absl::StrAppend(&text, "  ", plan.left_out,
                    " that cost more than one of their kind that meets the SLO: left out\n");
  if (plan.over_budget > 0) absl::StrAppend(&text, "  ", plan.over_budget, " over the budget: left out\n");
  text += "\n";
  for (const auto& best : {plan.best_whole, plan.best_split})
    if (best.has_value()) text += Details(input, plan.tried[*best]);
  text += BreakEvenText(input, plan);
  text += MeasuredText(measured);
  text += "not in these predictions:\n";
  for (const char* limit : kNotPredicted) absl::StrAppend(&text, "  ", limit, "\n");
  return text;
}

std::string PlanJson(const PlanInput& input, const Plan& plan, const std::vector<MeasuredLoad>& measured) {
  Json json = {{"model", input.work.name},       {"requests", input.requests.size()},
               {"slo", SloText(input.slo)},      {"prices", input.catalogue.name},
               {"dated", input.catalogue.dated}, {"utilization", input.utilization}};
  json["kv_cache_dtype"] = KvCacheDtypeOf(input);
  json["devices"] = Json::array();
  for (const plan::PlanDevice& device : input.devices)
    json["devices"].push_back({{"name", device.profile.name},
                               {"profile_dated", device.profile.dated},
                               {"profile_load", device.profile.load},
                               {"most", device.most}});
  json["layouts"] = Json::array();
  for (const LayoutPlan& one : plan.tried) json["layouts"].push_back(LayoutJson(one));
  const auto name = [&](const std::optional<size_t>& i) {
    return i.has_value() ? Json(plan.tried[*i].layout.name) : Json(nullptr);
  };
  json["cheapest"] = name(plan.best);
  json["cheapest_whole"] = name(plan.best_whole);
  json["cheapest_split"] = name(plan.best_split);
  json["left_out"] = plan.left_out;
  json["over_budget"] = plan.over_budget;
  if (plan.break_even.has_value())
    json["break_even"] = {{"price_ratio_low", plan.break_even->ratio_low},
                          {"price_ratio_high", plan.break_even->ratio_high},
                          {"ratio_of_prices_low", plan.break_even->prices_low},
                          {"ratio_of_prices_high", plan.break_even->prices_high}};
  if (!measured.empty()) json["measured"] = MeasuredJson(measured);
  json["not_predicted"] = kNotPredicted;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string NoLayoutText(const PlanInput& input, const Plan& plan) {
  const LayoutPlan* nearest = nullptr;
  for (const LayoutPlan& one : plan.tried)
    if (one.impossible.empty() && (nearest == nullptr || one.outcome.good_share > nearest->outcome.good_share))
      nearest = &one;
  std::string text = absl::StrCat("--slo: no layout of these devices keeps to it (", SloText(input.slo), ")");
  if (input.budget.has_value()) absl::StrAppendFormat(&text, " within --budget %g $/h", *input.budget);
  if (nearest == nullptr && plan.tried.empty()) return text + ": every layout costs more";
  if (nearest == nullptr)
    return absl::StrCat(text, ": ", plan.tried.front().layout.name, ": ", plan.tried.front().impossible);
  absl::StrAppendFormat(&text, "; %s came nearest with %.1f %% %s, where %s binds", nearest->layout.name,
                        100 * nearest->outcome.good_share,
                        nearest->outcome.stopped ? "until too many had missed it" : "of the requests", nearest->binds);
  return text;
}

}  // namespace dovetail::cli
