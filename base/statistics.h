#pragma once
#include <vector>

namespace dovetail {

// What repeated measurements of one thing say. All zero without a value.
// Threads: pure.
struct Summary {
  double median = 0;
  double min = 0;
  double max = 0;
  int count = 0;

  // (max - min) / median: how far one run may be from another. 0 when the median is 0.
  double spread() const { return median == 0 ? 0 : (max - min) / median; }
};
Summary Summarize(const std::vector<double>& values);

// The p-th percentile, p in 0..100, linear between the two nearest ranks (as NumPy's default). 0 without a value.
double Percentile(std::vector<double> values, double p);

double Mean(const std::vector<double>& values);  // 0 without a value

// Of these values as the whole population (divided by their number, as NumPy's default). 0 without a value.
double StandardDeviation(const std::vector<double>& values);

}  // namespace dovetail
