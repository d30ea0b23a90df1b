#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "report/charts.h"
#include "report/escape.h"
#include "report/scale.h"
#include "report/svg.h"

namespace dovetail::report {
namespace {

constexpr double kLeft = 4, kRight = 464, kRow = 50, kBar = 20, kName = 16, kAxis = 42;
constexpr double kPadding = 4;  // of a text within its bar, left and right

double Counted(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

double SumOf(const BarChart::Bar& bar) {
  double sum = 0;
  for (const double value : bar.values) sum += Counted(value);
  return sum;
}

std::string Rectangle(double x, double y, double width, size_t part, const std::string& says) {
  return absl::StrCat("<rect x=\"", svg::Number(x), "\" y=\"", svg::Number(y), "\" width=\"", svg::Number(width),
                      "\" height=\"", svg::Number(kBar), "\" class=\"sign fill", part % kColors, "\"><title>",
                      Escaped(says), "</title></rect>");
}

std::string BarAt(const BarChart& chart, const BarChart::Bar& bar, double y, const Scale& scale) {
  const auto width_of = [&](double value) { return (kRight - kLeft) * (scale.At(value) - scale.At(0)); };
  std::string out = svg::Text(kLeft, y + kName - 4, "start", "name", bar.name);
  const double sum = SumOf(bar);
  out += svg::Text(kRight, y + kName - 4, "end", "tick", absl::StrCat(Short(sum), " ", chart.unit));
  double x = kLeft;
  for (size_t part = 0; part < std::min(bar.values.size(), chart.parts.size()); ++part) {
    const double value = Counted(bar.values[part]), width = width_of(value);
    if (width == 0) continue;
    out += Rectangle(x, y + kName, width, part, absl::StrCat(chart.parts[part], ": ", Short(value), " ", chart.unit));
    const std::string share = absl::StrCat(std::lround(100 * value / sum), " %");
    if (svg::WidthOf(share) + 2 * kPadding <= width)
      out += svg::Text(x + width / 2, y + kName + kBar - 6, "middle", "inside", share);
    x += width;
  }
  return out;
}

}  // namespace

std::string SvgOf(const BarChart& chart, const std::string& id, const std::string& says) {
  std::vector<double> sums = {0};
  for (const BarChart::Bar& bar : chart.bars) sums.push_back(SumOf(bar));
  const Scale scale = Scale::Of(sums, false);
  const double bottom = kRow * static_cast<double>(chart.bars.size());
  std::string ticks;
  for (const double tick : scale.ticks()) {
    const double x = kLeft + (kRight - kLeft) * scale.At(tick);
    const bool first = tick == scale.ticks().front(), last = tick == scale.ticks().back();
    ticks += svg::Line(x, bottom, x, bottom + 5, "base");
    ticks += svg::Text(x, bottom + 18, first ? "start" : last ? "end" : "middle", "tick", Short(tick));
  }
  ticks += svg::Line(kLeft, bottom, kRight, bottom, "base");
  ticks += svg::Text((kLeft + kRight) / 2, bottom + kAxis - 6, "middle", "axis", chart.unit);
  std::string bars;
  for (size_t i = 0; i < chart.bars.size(); ++i)
    bars += BarAt(chart, chart.bars[i], kRow * static_cast<double>(i), scale);
  return svg::Picture(bottom + kAxis, id, chart.title, says, bars + ticks);
}

std::string LegendOf(const BarChart& chart) {
  std::string out = "<ul class=\"legend\">";
  for (size_t part = 0; part < chart.parts.size(); ++part)
    absl::StrAppend(&out, "<li><svg viewBox=\"0 0 16 16\" class=\"swatch\" aria-hidden=\"true\"><rect x=\"1\" y=\"1\"",
                    " width=\"14\" height=\"14\" class=\"fill", part % kColors, "\"/></svg>",
                    Escaped(chart.parts[part]), "</li>");
  return out + "</ul>\n";
}

}  // namespace dovetail::report
