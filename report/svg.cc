#include "report/svg.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "report/escape.h"
#include "report/figure.h"

namespace dovetail::report::svg {
namespace {

constexpr double kSign = 4.5;  // from its middle to its edge

std::string Polygon(double x, double y, std::initializer_list<std::pair<double, double>> corners) {
  std::string points;
  for (const auto& [dx, dy] : corners) absl::StrAppend(&points, Number(x + dx), ",", Number(y + dy), " ");
  if (!points.empty()) points.pop_back();
  return absl::StrCat("<polygon points=\"", points, "\"");
}

}  // namespace

std::string Number(double value) { return absl::StrCat(std::round(value * 100) / 100); }

double WidthOf(std::string_view text) { return kLetter * static_cast<double>(Characters(text)); }

std::string Picture(double height, const std::string& id, std::string_view title, std::string_view says,
                    std::string_view body) {
  return absl::StrCat("<svg viewBox=\"0 0 ", Number(kWidth), " ", Number(height), "\" role=\"img\" aria-labelledby=\"",
                      id, "-title ", id, "-says\"><title id=\"", id, "-title\">", Escaped(title), "</title><desc id=\"",
                      id, "-says\">", Escaped(says), "</desc>", std::string(body), "</svg>\n");
}

std::string Text(double x, double y, const char* anchor, const char* classes, std::string_view text) {
  return absl::StrCat("<text x=\"", Number(x), "\" y=\"", Number(y), "\" text-anchor=\"", anchor, "\" class=\"",
                      classes, "\">", Escaped(text), "</text>");
}

std::string Line(double x1, double y1, double x2, double y2, const std::string& classes) {
  return absl::StrCat("<line x1=\"", Number(x1), "\" y1=\"", Number(y1), "\" x2=\"", Number(x2), "\" y2=\"", Number(y2),
                      "\" class=\"", classes, "\"/>");
}

std::string Sign(double x, double y, int color, std::string_view says) {
  constexpr double s = kSign;
  std::string shape;
  switch (color % kColors) {
    case 0: shape = absl::StrCat("<circle cx=\"", Number(x), "\" cy=\"", Number(y), "\" r=\"", Number(s), "\""); break;
    case 1: shape = Polygon(x, y, {{-s, -s}, {s, -s}, {s, s}, {-s, s}}); break;
    case 2: shape = Polygon(x, y, {{0, -s - 1}, {s + 1, s}, {-s - 1, s}}); break;
    case 3: shape = Polygon(x, y, {{0, -s - 1}, {s + 1, 0}, {0, s + 1}, {-s - 1, 0}}); break;
    case 4: shape = Polygon(x, y, {{0, s + 1}, {s + 1, -s}, {-s - 1, -s}}); break;
    default: shape = Polygon(x, y, {{-s, -2}, {0, -s - 1}, {s, -2}, {s - 2, s}, {2 - s, s}}); break;
  }
  const std::string classes = absl::StrCat(" class=\"sign fill", color % kColors, "\"");
  if (says.empty()) return absl::StrCat(shape, classes, "/>");
  const size_t element = shape.find(' ');
  return absl::StrCat(shape, classes, "><title>", Escaped(says), "</title></", shape.substr(1, element - 1), ">");
}

}  // namespace dovetail::report::svg
