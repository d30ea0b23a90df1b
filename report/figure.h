#pragma once
#include <string>
#include <utility>
#include <vector>

// What a report shows.
// Units: numbers of a figure are in the unit that its axis names.
// Threads: plain values.

namespace dovetail::report {

struct Point {
  double x = 0, y = 0;
  std::string says;  // shown where a pointer rests on it
};

struct Series {
  std::string name;
  std::vector<Point> points;  // those that are not finite, or not positive on a logarithmic axis, are left out
  bool line = true;           // joined in the order given
  bool dashed = false;
  int color = 0;  // of kColors; series that belong together share one
};
inline constexpr int kColors = 6;

struct Axis {
  std::string name;  // with its unit
  bool logarithmic = false;
  double at_least = 0, at_most = 0;  // values that the axis has to show; equal: those of the points only
};

// A straight line through a chart, with what it stands for.
struct Mark {
  double at = 0;
  std::string name;
};

struct PointChart {
  std::string title;
  Axis x, y;
  std::vector<Series> series;
  std::vector<Mark> on_x, on_y;
  bool diagonal = false;     // both axes are alike, and the line y = x is drawn
  double diagonal_band = 0;  // as a share: the lines y = x (1 +- band)
};

// Bars that lie one below the other, each a sum of parts.
struct BarChart {
  std::string title, unit;
  std::vector<std::string> parts;
  struct Bar {
    std::string name;
    std::vector<double> values;  // of each part; not finite or negative: 0
  };
  std::vector<Bar> bars;
};

struct Table {
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;  // as long as `head`
};

// One question and its answer. A figure without data has `missing` and nothing else besides its title.
struct Figure {
  std::string title;
  std::string says;  // what is to be seen, in a sentence or two
  std::vector<PointChart> charts;
  std::vector<BarChart> bars;
  Table table;          // the numbers of the charts
  std::string missing;  // what is not there, and how to get it
};

struct Report {
  std::string title, subtitle;
  std::vector<std::pair<std::string, std::string>> facts;  // name, value: what matters most, first
  std::vector<std::string> notes;                          // what makes the numbers other than they seem
  std::vector<Figure> figures;
  std::string footer;
};

}  // namespace dovetail::report
