#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/weights.h"

// The spatio-temporal model in double precision, token by token, of the same weights and input.
// Threads: pure.

namespace dovetail::spatio_temporal {

using Doubles = std::vector<double>;

inline Doubles DoublesOf(const std::vector<BF16>& values) {
  Doubles out(values.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = ToFloat(values[i]);
  return out;
}

// [n][in] times the transpose of [out][in].
inline Doubles Times(const Doubles& x, const std::vector<BF16>& matrix, int64_t in) {
  const Doubles w = DoublesOf(matrix);
  const int64_t n = static_cast<int64_t>(x.size()) / in, out = static_cast<int64_t>(w.size()) / in;
  Doubles y(n * out);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t o = 0; o < out; ++o)
      for (int64_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[o * in + i];
  return y;
}

inline Doubles Normed(const Doubles& x, const std::vector<float>& weight) {
  const size_t c = weight.size();
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += c) {
    double squares = 0;
    for (size_t i = 0; i < c; ++i) squares += x[row + i] * x[row + i];
    for (size_t i = 0; i < c; ++i) y[row + i] = x[row + i] / std::sqrt(squares / c + 1e-6) * weight[i];
  }
  return y;
}

// One block; rows of one sequence are those with the same group_of(t, s).
inline void ReferenceBlock(const Config& config, const BlockValues& weights, bool spatial, Doubles& x) {
  const int64_t c = config.channels, dim = config.head_dim(), rows = config.frames * config.positions;
  const Doubles normed = Normed(x, weights.attention_norm);
  const Doubles q = Times(normed, weights.query, c);
  const Doubles k = Times(normed, weights.key, c);
  const Doubles v = Times(normed, weights.value, c);
  Doubles o(x.size());
  const auto sequence_of = [&](int64_t row) { return spatial ? row / config.positions : row % config.positions; };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < config.heads; ++head) {
      double sum = 0;
      for (int64_t other = 0; other < rows; ++other) {
        if (sequence_of(other) != sequence_of(row)) continue;
        double score = 0;
        for (int64_t i = head * dim; i < (head + 1) * dim; ++i) score += q[row * c + i] * k[other * c + i];
        const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));
        sum += weight;
        for (int64_t i = head * dim; i < (head + 1) * dim; ++i) o[row * c + i] += weight * v[other * c + i];
      }
      for (int64_t i = head * dim; i < (head + 1) * dim; ++i) o[row * c + i] /= sum;
    }
  }
  const auto add = [&](const Doubles& more) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
  };
  add(Times(o, weights.out, c));
  const Doubles again = Normed(x, weights.mlp_norm);
  Doubles gate = Times(again, weights.gate, c);
  const Doubles up = Times(again, weights.up, c);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    gate[i] = g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * up[i];
  }
  add(Times(gate, weights.down, config.mlp()));
}

inline Doubles RandomHidden(const Config& config) {
  std::vector<BF16> x(config.frames * config.positions * config.channels);
  for (int64_t t = 0; t < config.frames; ++t)
    for (int64_t s = 0; s < config.positions; ++s)
      RandomRow(config, t, s, x.data() + (t * config.positions + s) * config.channels);
  return DoublesOf(x);
}

// Hidden after all pairs.
inline Doubles ReferenceHidden(const Config& config) {
  Doubles x = RandomHidden(config);
  for (int pair = 0; pair < config.pairs; ++pair) {
    ReferenceBlock(config, RandomBlock(config, pair, BlockKind::kSpatial), true, x);
    ReferenceBlock(config, RandomBlock(config, pair, BlockKind::kTemporal), false, x);
  }
  return x;
}

// Of bf16 in memory.
template <typename Bytes>
Doubles HiddenOf(const Bytes& bytes) {
  std::vector<BF16> values(bytes.size() / sizeof(BF16));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return DoublesOf(values);
}

// Root of the mean square of a - b over that of b.
inline double Distance(const Doubles& a, const Doubles& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(error / size);
}

}  // namespace dovetail::spatio_temporal
