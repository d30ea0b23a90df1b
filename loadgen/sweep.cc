#include "loadgen/sweep.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace dovetail::loadgen {
namespace {

constexpr size_t kMaxRates = 64;
constexpr int kMaxRefinements = 16;

absl::StatusOr<double> ParseRate(const std::string& text) {
  double rate = 0;
  if (!absl::SimpleAtod(text, &rate) || !std::isfinite(rate) || rate <= 0)
    return InvalidArgument("--sweep-rates: '", text, "' is not a positive rate; give 1,2,4 or 1:64");
  return rate;
}

}  // namespace

absl::Status SweepOptions::Validate() const {
  if (rates.empty()) return InvalidArgument("--sweep-rates: names no rate");
  if (rates.size() > kMaxRates)
    return InvalidArgument("--sweep-rates: ", rates.size(), " rates are more than ", kMaxRates);
  for (size_t i = 1; i < rates.size(); ++i)
    if (!(rates[i] > rates[i - 1]))
      return InvalidArgument("--sweep-rates: ", rates[i], " does not rise above ", rates[i - 1]);
  if (!(attainment > 0 && attainment <= 1))
    return InvalidArgument("--slo-attainment: ", attainment, " is outside (0, 1]");
  if (refine < 0 || refine > kMaxRefinements)
    return InvalidArgument("--sweep-refine: ", refine, " is outside 0..", kMaxRefinements);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> ParseRates(const std::string& text) {
  std::vector<double> rates;
  const std::vector<std::string> ends = absl::StrSplit(text, ':');
  if (ends.size() == 2) {
    DT_ASSIGN_OR_RETURN(const double first, ParseRate(ends[0]));
    DT_ASSIGN_OR_RETURN(const double last, ParseRate(ends[1]));
    for (double rate = first; rate <= last && rates.size() <= kMaxRates; rate *= 2) rates.push_back(rate);
    return rates;
  }
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
    DT_ASSIGN_OR_RETURN(const double rate, ParseRate(part));
    rates.push_back(rate);
  }
  return rates;
}

Knee FindKnee(const SweepOptions& options, const std::vector<SweepPoint>& points) {
  Knee knee;
  for (const SweepPoint& point : points) {
    if (point.attained >= options.attainment) {
      if (!knee.holds.has_value() || point.rate > *knee.holds) knee.holds = point.rate;
    } else if (!knee.fails.has_value() || point.rate < *knee.fails) {
      knee.fails = point.rate;
    }
  }
  return knee;
}

std::optional<double> NextRate(const SweepOptions& options, const std::vector<SweepPoint>& points) {
  const Knee knee = FindKnee(options, points);
  if (!knee.fails.has_value()) {
    if (points.size() < options.rates.size()) return options.rates[points.size()];
    return std::nullopt;
  }
  // The rates up to the first that failed came from the list; what follows is refinement.
  const auto listed = std::find_if(points.begin(), points.end(),
                                   [&](const SweepPoint& point) { return point.attained < options.attainment; }) -
                      points.begin() + 1;
  const auto refined = std::ssize(points) - listed;
  if (!knee.holds.has_value() || refined >= options.refine || *knee.holds >= *knee.fails) return std::nullopt;
  return (*knee.holds + *knee.fails) / 2;
}

}  // namespace dovetail::loadgen
