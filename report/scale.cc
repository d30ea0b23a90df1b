#include "report/scale.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dovetail::report {
namespace {

constexpr double kTicks = 5;         // about so many on a linear scale
constexpr double kManyDecades = 2;   // from so many on a logarithmic scale has ticks at powers of ten only
constexpr double kMostDecades = 12;  // what lies further below the largest value is not shown
constexpr double kSmall = 1e-3, kLarge = 1e7;
constexpr double kSlack = 1e-9;

// 1, 2 or 5 times a power of ten, at least `step`.
double RoundStep(double step) {
  const double power = std::pow(10, std::floor(std::log10(step)));
  for (const double times : {1.0, 2.0, 5.0})
    if (times * power >= step * (1 - kSlack)) return times * power;
  return 10 * power;
}

}  // namespace

Scale Scale::Linear(double least, double most) {
  if (least >= 0) least = 0;
  if (most <= least) most = least + (least == 0 ? 1 : std::abs(least));
  const double step = RoundStep((most - least) / kTicks);
  Scale scale(step * std::floor(least / step + kSlack), step * std::ceil(most / step - kSlack), false);
  const double count = std::round((scale.end_ - scale.begin_) / step);
  for (double i = 0; i <= count; ++i) scale.ticks_.push_back(scale.begin_ + i * step);
  return scale;
}

Scale Scale::Logarithmic(double least, double most) {
  least = std::max(least, most * std::pow(10, -kMostDecades));
  std::vector<double> steps;
  for (double decade = std::floor(std::log10(least)); decade <= std::ceil(std::log10(most)); ++decade)
    for (const double times : {1.0, 2.0, 5.0}) steps.push_back(times * std::pow(10, decade));
  const auto first = std::upper_bound(steps.begin(), steps.end(), least * (1 + kSlack)) - 1;
  auto last = std::lower_bound(steps.begin(), steps.end(), most * (1 - kSlack));
  if (last == first) ++last;
  Scale scale(*first, *last, true);
  const bool many = std::log10(scale.end_ / scale.begin_) > kManyDecades;
  for (auto step = first; step <= last; ++step) {
    const double decade = std::log10(*step);
    if (!many || std::abs(decade - std::round(decade)) < kSlack) scale.ticks_.push_back(*step);
  }
  return scale;
}

Scale Scale::Of(const std::vector<double>& values, bool logarithmic) {
  double least = INFINITY, most = -INFINITY;
  for (const double value : values) {
    if (!std::isfinite(value) || (logarithmic && value <= 0)) continue;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  if (least > most) least = logarithmic ? 1 : 0, most = logarithmic ? 10 : 1;
  return logarithmic ? Logarithmic(least, most) : Linear(least, most);
}

double Scale::At(double value) const {
  if (logarithmic_) return std::log(value / begin_) / std::log(end_ / begin_);
  return (value - begin_) / (end_ - begin_);
}

bool Scale::Holds(double value) const { return std::isfinite(value) && (!logarithmic_ || value > 0); }

std::string Short(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::abs(value);
  if (size == 0) return "0";
  if (size < kSmall || size >= kLarge) return absl::StrFormat("%.3g", value);
  const double power = std::pow(10, std::floor(std::log10(size)) - 2);
  const double rounded = std::round(value / power) * power;
  if (std::abs(rounded) < 1000) {
    std::string text =
        absl::StrFormat("%.*f", std::max(0, -static_cast<int>(std::floor(std::log10(power) + kSlack))), rounded);
    if (text.find('.') == std::string::npos) return text;
    while (text.back() == '0') text.pop_back();
    if (text.back() == '.') text.pop_back();
    return text;
  }
  const std::string digits = absl::StrCat(static_cast<int64_t>(std::llround(std::abs(rounded))));
  std::string text = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace dovetail::report
