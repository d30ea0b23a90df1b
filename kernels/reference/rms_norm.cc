#include "kernels/reference/rms_norm.h"

#include <cmath>

namespace dovetail::kernels::reference {

std::vector<double> RmsNorm(std::span<const float> x, std::span<const float> residual, std::span<const float> weight,
                            double eps) {
  std::vector<double> y(x.begin(), x.end());
  double squares = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    if (!residual.empty()) y[i] += residual[i];
    squares += y[i] * y[i];
  }
  const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(y.size()) + eps);
  for (size_t i = 0; i < y.size(); ++i) y[i] *= inverse * weight[i];
  return y;
}

}  // namespace dovetail::kernels::reference
