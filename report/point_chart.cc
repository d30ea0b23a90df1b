#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "report/charts.h"
#include "report/escape.h"
#include "report/scale.h"
#include "report/svg.h"

namespace dovetail::report {
namespace {

constexpr double kHeight = 312, kLeft = 64, kRight = 456, kTop = 30, kBottom = 264;
constexpr double kMarkRow = 15;   // height of a mark's name
constexpr double kTickGap = 8;    // between names of ticks, at least
constexpr double kNearRight = 8;  // between a mark and its name

std::string ColorClass(const char* kind, int color) { return absl::StrCat(kind, color % kColors); }

// One chart being drawn: its scales, and the text so far.
class Drawing {
 public:
  explicit Drawing(const PointChart& chart)
      : chart_(chart), x_(ScaleOf(chart.x, &Point::x, chart.on_x)), y_(ScaleOf(chart.y, &Point::y, chart.on_y)) {
    if (!chart.diagonal) return;
    std::vector<double> both = ValuesOf(chart.x, &Point::x, chart.on_x);
    const std::vector<double> more = ValuesOf(chart.y, &Point::y, chart.on_y);
    both.insert(both.end(), more.begin(), more.end());
    x_ = y_ = Scale::Of(both, chart.x.logarithmic);
  }

  std::string Body() {
    DrawAxes();
    if (chart_.diagonal) DrawDiagonal();
    for (const Mark& mark : chart_.on_y) DrawMarkOnY(mark);
    for (const Series& series : chart_.series) DrawSeries(series);
    DrawMarksOnX();
    return body_;
  }

 private:
  std::vector<double> ValuesOf(const Axis& axis, double Point::*field, const std::vector<Mark>& marks) const {
    std::vector<double> values;
    for (const Series& series : chart_.series)
      for (const Point& point : series.points) values.push_back(point.*field);
    for (const Mark& mark : marks) values.push_back(mark.at);
    if (axis.at_least < axis.at_most) values.insert(values.end(), {axis.at_least, axis.at_most});
    return values;
  }
  Scale ScaleOf(const Axis& axis, double Point::*field, const std::vector<Mark>& marks) const {
    return Scale::Of(ValuesOf(axis, field, marks), axis.logarithmic);
  }
  double X(double value) const { return kLeft + (kRight - kLeft) * x_.At(value); }
  double Y(double value) const { return kBottom - (kBottom - kTop) * y_.At(value); }

  void DrawAxes() {
    body_ += svg::Text(4, 14, "start", "axis", chart_.y.name);
    for (const double tick : y_.ticks()) {
      body_ += svg::Line(kLeft, Y(tick), kRight, Y(tick), "grid");
      body_ += svg::Text(kLeft - 7, Y(tick) + 4, "end", "tick", Short(tick));
    }
    body_ += svg::Line(kLeft, kBottom, kRight, kBottom, "base");
    double free_from = 0;
    for (const double tick : x_.ticks()) {
      const double half = svg::WidthOf(Short(tick)) / 2;
      body_ += svg::Line(X(tick), kBottom, X(tick), kBottom + 5, "base");
      if (X(tick) - half < free_from) continue;
      body_ += svg::Text(X(tick), kBottom + 19, "middle", "tick", Short(tick));
      free_from = X(tick) + half + kTickGap;
    }
    body_ += svg::Text((kLeft + kRight) / 2, kHeight - 6, "middle", "axis", chart_.x.name);
  }

  void DrawDiagonal() {
    const double begin = x_.begin(), end = x_.end(), band = chart_.diagonal_band;
    if (band > 0) {
      const auto corner = [&](double x, double y) { return absl::StrCat(svg::Number(X(x)), ",", svg::Number(Y(y))); };
      absl::StrAppend(&body_, "<polygon class=\"band\" points=\"", corner(begin, begin), " ",
                      corner(begin / (1 - band), begin), " ", corner(end, end * (1 - band)), " ", corner(end, end), " ",
                      corner(end / (1 + band), end), " ", corner(begin, begin * (1 + band)), "\"/>");
    }
    body_ += svg::Line(X(begin), Y(begin), X(end), Y(end), "mark");
  }

  void DrawMarkOnY(const Mark& mark) {
    if (!y_.Holds(mark.at)) return;
    body_ += svg::Line(kLeft, Y(mark.at), kRight, Y(mark.at), "mark");
    body_ += svg::Text(kRight, Y(mark.at) - 5, "end", "note", mark.name);
  }

  // Each name next to its line, in the highest row where it meets no other.
  void DrawMarksOnX() {
    std::vector<Mark> marks = chart_.on_x;
    std::erase_if(marks, [&](const Mark& mark) { return !x_.Holds(mark.at); });
    std::sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.at < b.at; });
    std::vector<std::vector<std::pair<double, double>>> rows;
    for (const Mark& mark : marks) {
      const double x = X(mark.at), width = svg::WidthOf(mark.name);
      const bool to_the_left = x + kNearRight + width > kRight && x - kNearRight - width >= kLeft;
      const std::pair<double, double> taken =
          to_the_left ? std::pair(x - kNearRight - width, x) : std::pair(x, x + kNearRight + width);
      size_t row = 0;
      const auto meets = [&](const std::pair<double, double>& other) {
        return taken.first < other.second && other.first < taken.second;
      };
      while (row < rows.size() && std::any_of(rows[row].begin(), rows[row].end(), meets)) ++row;
      if (row == rows.size()) rows.emplace_back();
      rows[row].push_back(taken);
      body_ += svg::Line(x, kTop, x, kBottom, "mark");
      body_ += svg::Text(to_the_left ? x - 5 : x + 5, kTop + 12 + kMarkRow * static_cast<double>(row),
                         to_the_left ? "end" : "start", "note", mark.name);
    }
  }

  void DrawSeries(const Series& series) {
    std::vector<std::pair<Point, std::string>> shown;
    for (const Point& point : series.points)
      if (x_.Holds(point.x) && y_.Holds(point.y))
        shown.emplace_back(point, absl::StrCat(svg::Number(X(point.x)), ",", svg::Number(Y(point.y))));
    if (series.line && shown.size() > 1) {
      std::string path;
      for (const auto& [point, place] : shown) absl::StrAppend(&path, path.empty() ? "" : " ", place);
      absl::StrAppend(&body_, "<polyline class=\"", ColorClass("line", series.color), series.dashed ? " dashed" : "",
                      "\" points=\"", path, "\"/>");
    }
    const bool many = series.line && shown.size() > kMostSigns;
    for (const auto& [point, place] : shown)
      if (!many) body_ += svg::Sign(X(point.x), Y(point.y), series.color, point.says);
  }

  static constexpr size_t kMostSigns = 24;  // of a line: more of them would hide it

  const PointChart& chart_;
  Scale x_, y_;
  std::string body_;
};

}  // namespace

std::string SvgOf(const PointChart& chart, const std::string& id, const std::string& says) {
  return svg::Picture(kHeight, id, chart.title, says, Drawing(chart).Body());
}

std::string LegendOf(const PointChart& chart) {
  if (chart.series.size() < 2) return "";
  std::string out = "<ul class=\"legend\">";
  for (const Series& series : chart.series) {
    std::string picture;
    if (series.line)
      picture = svg::Line(1, 8, 27, 8, absl::StrCat(ColorClass("line", series.color), series.dashed ? " dashed" : ""));
    picture += svg::Sign(14, 8, series.color, "");
    absl::StrAppend(&out, "<li><svg viewBox=\"0 0 28 16\" class=\"swatch\" aria-hidden=\"true\">", picture, "</svg>",
                    Escaped(series.name), "</li>");
  }
  return out + "</ul>\n";
}

}  // namespace dovetail::report
