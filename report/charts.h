#pragma once
#include <string>

#include "report/figure.h"

// Charts as SVG elements that stand in HTML. Colours are classes of style.h.
// Threads: pure.

namespace dovetail::report {

// `id` is unique in the document: title and description of the picture are named by it. `says` is its description.
std::string SvgOf(const PointChart& chart, const std::string& id, const std::string& says);
std::string SvgOf(const BarChart& chart, const std::string& id, const std::string& says);

// What the colours and marks of a chart stand for, as HTML. Empty where one series needs no name.
std::string LegendOf(const PointChart& chart);
std::string LegendOf(const BarChart& chart);

}  // namespace dovetail::report
