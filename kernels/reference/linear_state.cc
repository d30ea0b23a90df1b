#include "kernels/reference/linear_state.h"

#include <cmath>

namespace dovetail::kernels::reference {

std::vector<double> LinearState(const LinearStateShape& shape, const LinearStateTokens& tokens,
                                std::vector<double>& state) {
  const int keys = shape.key_dim, values = shape.value_dim;
  std::vector<double> out(static_cast<size_t>(tokens.rows) * values);
  std::vector<double> w(keys), b(keys), c(keys), recalled(values);
  for (int64_t t = 0; t < tokens.rows; ++t) {
    const float* k = tokens.k + t * keys;
    const double beta = shape.update == StateUpdate::kDelta ? tokens.beta[t] : 1.0;
    for (int i = 0; i < keys; ++i) {
      w[i] = std::exp(static_cast<double>(shape.decay == DecayForm::kVector ? tokens.log_decay[t * keys + i]
                                                                            : tokens.log_decay[t]));
      if (shape.update == StateUpdate::kDelta) {
        b[i] = -beta * k[i];
        c[i] = w[i] * k[i];
      } else if (shape.update == StateUpdate::kRankOne) {
        b[i] = tokens.b[t * keys + i];
        c[i] = tokens.c[t * keys + i];
      }
    }
    for (int n = 0; n < values; ++n) {
      recalled[n] = 0;
      for (int i = 0; i < keys; ++i) recalled[n] += c[i] * state[i * values + n];
    }
    for (int i = 0; i < keys; ++i)
      for (int n = 0; n < values; ++n)
        state[i * values + n] =
            w[i] * state[i * values + n] + b[i] * recalled[n] + k[i] * beta * tokens.v[t * values + n];
    for (int i = 0; i < keys; ++i)
      for (int n = 0; n < values; ++n) out[t * values + n] += tokens.q[t * keys + i] * state[i * values + n];
  }
  return out;
}

}  // namespace dovetail::kernels::reference
