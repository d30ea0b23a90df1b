#include "kernels/reference/activation.h"

#include <algorithm>
#include <cmath>

namespace dovetail::kernels::reference {

double SiluMul(double gate, double up) { return gate / (1.0 + std::exp(-gate)) * up; }

double GeluMul(double gate, double up) {
  constexpr double kPi = 3.14159265358979323846;
  // 1 + tanh u = 2 / (1 + e^-2u), which does not cancel for negative u.
  const double u = std::sqrt(2.0 / kPi) * (gate + 0.044715 * gate * gate * gate);
  return gate / (1.0 + std::exp(-2.0 * u)) * up;
}

double ReluMul(double gate, double up) { return gate > 0 ? gate * up : 0.0; }

double ClampedSwiglu(double gate, double up) {
  const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
  return g / (1.0 + std::exp(-1.702 * g)) * (u + 1.0);
}

}  // namespace dovetail::kernels::reference
