#include "kernels/reference/rope.h"

#include <cmath>

namespace dovetail::kernels::reference {

std::vector<double> Rope(std::span<const float> head, int position, std::span<const float> inv_freq,
                         double multiplier) {
  std::vector<double> y(head.begin(), head.end());
  const size_t half = inv_freq.size();
  for (size_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    const double c = std::cos(double{angle}) * multiplier, s = std::sin(double{angle}) * multiplier;
    y[i] = head[i] * c - head[i + half] * s;
    y[i + half] = head[i + half] * c + head[i] * s;
  }
  return y;
}

}  // namespace dovetail::kernels::reference
