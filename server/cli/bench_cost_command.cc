#include "server/cli/bench_cost_command.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "plan/catalogue.h"
#include "plan/cost.h"
#include "server/cli/command_line.h"
#include "server/cli/cost_report.h"
#include "server/cli/report_file.h"
#include "server/cli/text_file.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using plan::Catalogue;
using plan::PriceOf;
using plan::Role;
using plan::TokenCost;

struct Comparison {
  const MeasuredLayout* whole;
  const MeasuredLayout* split;
  double break_even_low, break_even_high;  // with low and with high prices of compute devices and hosts
  double ratio_low, ratio_high;            // that the prices have
};

absl::StatusOr<double> NumberOf(const json& result, const char* field, const std::string& path) {
  const auto found = result.find(field);
  if (found == result.end() || !found->is_number() || !(found->get<double>() >= 0))
    return InvalidArgument(path, ": ", field, ": is no number of at least 0; give a result of `dovetail bench serve`");
  return found->get<double>();
}

// The last result of a file: --append-result writes one a line.
absl::StatusOr<plan::Throughput> ThroughputIn(std::string text, const std::string& path) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const size_t line = text.rfind("\n{");
  const json result = json::parse(line == std::string::npos ? text : text.substr(line + 1), nullptr, false);
  if (!result.is_object()) return InvalidArgument(path, ": is not the JSON of `dovetail bench serve --save-result`");
  DT_ASSIGN_OR_RETURN(const double seconds, NumberOf(result, "duration", path));
  DT_ASSIGN_OR_RETURN(const double input, NumberOf(result, "total_input_tokens", path));
  DT_ASSIGN_OR_RETURN(const double output, NumberOf(result, "total_output_tokens", path));
  if (seconds == 0 || output == 0)
    return InvalidArgument(path, ": total_output_tokens: there are none, so they have no price");
  plan::Throughput throughput{input / seconds, output / seconds, std::nullopt};
  if (result.contains("good_output_tokens") && result["good_output_tokens"].is_number())
    throughput.good_output_tokens_s = result["good_output_tokens"].get<double>() / seconds;
  return throughput;
}

absl::StatusOr<MeasuredLayout> ReadLayout(const std::string& text, const Catalogue& catalogue, double utilization) {
  const size_t equals = text.find('='), at = text.rfind('@');
  if (equals == std::string::npos || at == std::string::npos || at < equals || equals == 0)
    return InvalidArgument("--layout: '", text, "' is not NAME=RESULT.json@ROLE.DEVICE:COUNT,...");
  MeasuredLayout measured;
  measured.layout.name = text.substr(0, equals);
  measured.file = text.substr(equals + 1, at - equals - 1);
  measured.machines = text.substr(at + 1);
  auto machines = plan::ParseMachines(measured.machines);
  if (!machines.ok()) return Annotate(machines.status(), "--layout");
  measured.layout.machines = *std::move(machines);
  DT_ASSIGN_OR_RETURN(const std::string result, ReadText(measured.file));
  DT_ASSIGN_OR_RETURN(measured.throughput, ThroughputIn(result, measured.file));
  measured.details = ReadDetails(result);
  DT_ASSIGN_OR_RETURN(measured.low,
                      plan::CostOf(measured.layout, measured.throughput, catalogue, PriceOf::kLow, utilization));
  DT_ASSIGN_OR_RETURN(measured.high,
                      plan::CostOf(measured.layout, measured.throughput, catalogue, PriceOf::kHigh, utilization));
  return measured;
}

// Each layout that is not split against each that is.
absl::StatusOr<std::vector<Comparison>> Compare(const std::vector<MeasuredLayout>& all, const Catalogue& catalogue) {
  std::vector<Comparison> comparisons;
  for (const MeasuredLayout& split : all)
    for (const MeasuredLayout& whole : all) {
      if (split.layout.Count(Role::kAttention) == 0 || split.layout.Count(Role::kCompute) == 0 ||
          whole.layout.Count(Role::kAttention) > 0)
        continue;
      Comparison out{&whole, &split, 0, 0, 0, 0};
      const auto break_even = [&](PriceOf price) {
        return plan::BreakEvenRatio(whole.layout, whole.throughput, split.layout, split.throughput, catalogue, price);
      };
      DT_ASSIGN_OR_RETURN(out.break_even_low, break_even(PriceOf::kLow));
      DT_ASSIGN_OR_RETURN(out.break_even_high, break_even(PriceOf::kHigh));
      DT_ASSIGN_OR_RETURN(out.ratio_low, plan::PriceRatio(split.layout, catalogue, PriceOf::kLow));
      DT_ASSIGN_OR_RETURN(out.ratio_high, plan::PriceRatio(split.layout, catalogue, PriceOf::kHigh));
      comparisons.push_back(out);
    }
  return comparisons;
}

absl::StatusOr<std::vector<SplitAgainstWhole>> LinesOf(const std::vector<Comparison>& comparisons,
                                                       const Catalogue& catalogue) {
  std::vector<SplitAgainstWhole> lines;
  for (const Comparison& c : comparisons) {
    SplitAgainstWhole line{c.split->layout.name, c.whole->layout.name, {}, {}, c.ratio_low, c.ratio_high};
    const auto cost = [&](PriceOf price) {
      return plan::RelativeCostOf(c.whole->layout, c.whole->throughput, c.split->layout, c.split->throughput, catalogue,
                                  price);
    };
    DT_ASSIGN_OR_RETURN(line.low, cost(PriceOf::kLow));
    DT_ASSIGN_OR_RETURN(line.high, cost(PriceOf::kHigh));
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string Range(const std::optional<double>& low, const std::optional<double>& high) {
  if (!low.has_value() || !high.has_value()) return "-";
  return *low == *high ? absl::StrFormat("%.3f", *low) : absl::StrFormat("%.3f .. %.3f", *low, *high);
}

void PrintTable(const std::vector<MeasuredLayout>& all, const std::vector<Comparison>& comparisons,
                const Catalogue& catalogue, double utilization) {
  std::printf("prices of %s (%s), low .. high; under load for %.0f %% of the hours that are paid for\n\n",
              catalogue.name.c_str(), catalogue.dated.c_str(), utilization * 100);
  for (const MeasuredLayout& m : all) {
    std::printf("%s: %s, measured in %s\n", m.layout.name.c_str(), m.machines.c_str(), m.file.c_str());
    const auto line = [](const char* what, const std::string& value) {
      std::printf("  %-42s %s\n", what, value.c_str());
    };
    line("$ per hour, every machine", Range(m.low.usd_per_hour, m.high.usd_per_hour));
    line("tokens/s under load: input, output",
         absl::StrFormat("%.1f, %.1f", m.throughput.input_tokens_s, m.throughput.output_tokens_s));
    line("$ per million input tokens", Range(m.low.input_usd, m.high.input_usd));
    line("$ per million output tokens", Range(m.low.output_usd, m.high.output_usd));
    line("$ per million tokens of both kinds", Range(m.low.mixed_usd, m.high.mixed_usd));
    line("$ per million output tokens within the SLO", Range(m.low.good_output_usd, m.high.good_output_usd));
    line("output tokens/s per $/h", Range(m.high.output_tokens_s_per_usd_h, m.low.output_tokens_s_per_usd_h));
    std::printf("\n");
  }
  for (const Comparison& c : comparisons) {
    std::printf("%s against %s: pays below P_attention / P_compute = %s\n", c.split->layout.name.c_str(),
                c.whole->layout.name.c_str(), Range(c.break_even_low, c.break_even_high).c_str());
    if (c.break_even_low <= 0 && c.break_even_high <= 0)
      std::printf("  no price of attention devices makes this split pay: it makes too few tokens\n");
    else
      std::printf("  these prices have %s: it %s\n", Range(c.ratio_low, c.ratio_high).c_str(),
                  c.ratio_low < c.break_even_low && c.ratio_high < c.break_even_high     ? "pays"
                  : c.ratio_low >= c.break_even_low && c.ratio_high >= c.break_even_high ? "does not pay"
                                                                                         : "depends on the prices");
    for (const plan::KnownRatio& known : plan::kKnownRatios)
      std::printf("  %s's ratio: %.2f (%s)\n", known.whose, known.ratio, known.prices);
  }
}

json CostJson(const TokenCost& cost) {
  const auto value = [](const std::optional<double>& usd) { return usd.has_value() ? json(*usd) : json(nullptr); };
  return {{"usd_per_hour", cost.usd_per_hour},
          {"usd_per_million_input_tokens", value(cost.input_usd)},
          {"usd_per_million_output_tokens", value(cost.output_usd)},
          {"usd_per_million_tokens", value(cost.mixed_usd)},
          {"usd_per_million_output_tokens_within_slo", value(cost.good_output_usd)},
          {"output_tokens_per_s_per_usd_h", cost.output_tokens_s_per_usd_h}};
}

void PrintJson(const std::vector<MeasuredLayout>& all, const std::vector<Comparison>& comparisons,
               const Catalogue& catalogue, double utilization) {
  json out = {{"prices", catalogue.name}, {"dated", catalogue.dated}, {"utilization", utilization}};
  out["layouts"] = json::array();
  for (const MeasuredLayout& m : all)
    out["layouts"].push_back({{"name", m.layout.name},
                              {"machines", m.machines},
                              {"result", m.file},
                              {"input_tokens_per_s", m.throughput.input_tokens_s},
                              {"output_tokens_per_s", m.throughput.output_tokens_s},
                              {"low", CostJson(m.low)},
                              {"high", CostJson(m.high)}});
  out["break_even"] = json::array();
  for (const Comparison& c : comparisons)
    out["break_even"].push_back({{"whole", c.whole->layout.name},
                                 {"split", c.split->layout.name},
                                 {"price_ratio_low", c.break_even_low},
                                 {"price_ratio_high", c.break_even_high},
                                 {"ratio_of_prices_low", c.ratio_low},
                                 {"ratio_of_prices_high", c.ratio_high}});
  std::printf("%s\n", out.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

}  // namespace

void AddBenchCostFlags(CLI::App& command, BenchCostFlags& flags) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Cost");
  };
  add("--layout", flags.layout,
      "What was measured, and every machine that it was measured on, idle ones too; roles are compute, attention and "
      "host. Give one for each layout",
      "NAME=RESULT.json@ROLE.DEVICE:COUNT,...")
      ->required();
  AddPriceFlags(command, flags.prices, "Cost");
  add("--utilization", flags.utilization,
      "Share of the hours paid for in which the layout is under the measured load; 0.6 to 0.7 is usual", "SHARE")
      ->required();
  command.add_flag("--json", flags.json, "Print JSON")->group("Cost");
  add("--report", flags.report, kReportHelp, "FILE.html");
}

absl::Status RunBenchCost(const BenchCostFlags& flags) {
  DT_RETURN_IF_ERROR(CheckReportPath(flags.report));
  DT_ASSIGN_OR_RETURN(const Catalogue catalogue, ReadPrices(flags.prices));
  std::vector<MeasuredLayout> all;
  for (const std::string& text : flags.layout) {
    DT_ASSIGN_OR_RETURN(MeasuredLayout measured, ReadLayout(text, catalogue, flags.utilization));
    all.push_back(std::move(measured));
  }
  DT_ASSIGN_OR_RETURN(const auto comparisons, Compare(all, catalogue));
  (flags.json ? PrintJson : PrintTable)(all, comparisons, catalogue, flags.utilization);
  if (flags.report.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const auto lines, LinesOf(comparisons, catalogue));
  return WriteReport(CostReport({catalogue.name, catalogue.dated, flags.utilization, std::move(all), lines}),
                     flags.report);
}

}  // namespace dovetail::cli
