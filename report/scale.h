#pragma once
#include <string>
#include <vector>

// Axes: which numbers they begin and end with, where values lie on them, and how numbers are written.
// Threads: pure.

namespace dovetail::report {

class Scale {
 public:
  // Of these values, those that are not finite left out. A linear scale of values that are not negative begins at 0.
  // A logarithmic one leaves out what is not positive. Without a value: 0 to 1, or 1 to 10.
  static Scale Of(const std::vector<double>& values, bool logarithmic);

  // 0 at the begin of the scale, 1 at its end; beyond that for values outside.
  double At(double value) const;
  bool Holds(double value) const;  // can be shown at all
  const std::vector<double>& ticks() const { return ticks_; }
  double begin() const { return begin_; }
  double end() const { return end_; }

 private:
  Scale(double begin, double end, bool logarithmic) : begin_(begin), end_(end), logarithmic_(logarithmic) {}
  static Scale Linear(double least, double most);
  static Scale Logarithmic(double least, double most);

  double begin_, end_;
  bool logarithmic_;
  std::vector<double> ticks_;
};

// Three significant digits, thousands with commas: "0.42", "12,300", "3e-06"; "-" if it is not finite.
std::string Short(double value);

}  // namespace dovetail::report
