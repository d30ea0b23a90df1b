#include "kernels/affine_span.h"

#include <cmath>

namespace dovetail::kernels {
namespace {

size_t TransitionFloats(const LinearStateShape& shape) {
  const size_t keys = shape.key_dim;
  if (shape.update != StateUpdate::kAdd) return keys * keys;
  return shape.decay == DecayForm::kScalar ? 1 : keys;
}

size_t StateFloats(const LinearStateShape& shape) { return static_cast<size_t>(shape.key_dim) * shape.value_dim; }

std::vector<float> Rounded(const std::vector<double>& values) { return {values.begin(), values.end()}; }

// w, b and c of one token, in double.
struct TokenTerms {
  std::vector<double> w, b, c;
  double beta = 1;

  TokenTerms(const LinearStateShape& shape, const LinearStateItem& item, int row)
      : w(shape.key_dim), b(shape.key_dim), c(shape.key_dim) {
    const float* k = item.k + row * item.k_step;
    if (shape.update == StateUpdate::kDelta) beta = item.beta[row * item.beta_step];
    for (int i = 0; i < shape.key_dim; ++i) {
      const float* decay =
          item.log_decay != nullptr ? item.log_decay + row * item.decay_step : &item.constant_log_decay;
      w[i] = std::exp(static_cast<double>(decay[shape.decay == DecayForm::kVector ? i : 0]));
      if (shape.update == StateUpdate::kDelta) {
        b[i] = -beta * k[i];
        c[i] = w[i] * k[i];
      } else if (shape.update == StateUpdate::kRankOne) {
        b[i] = item.b[row * item.b_step + i];
        c[i] = item.c[row * item.c_step + i];
      }
    }
  }
};

// M = (diag(w) + b c^T) M + k v^T, in place; v may be null.
void Step(const TokenTerms& terms, const float* k, const float* v, int columns, std::vector<double>& m) {
  const int keys = static_cast<int>(terms.w.size());
  std::vector<double> recalled(columns, 0.0);
  for (int i = 0; i < keys; ++i)
    if (terms.c[i] != 0)
      for (int n = 0; n < columns; ++n) recalled[n] += terms.c[i] * m[i * columns + n];
  for (int i = 0; i < keys; ++i)
    for (int n = 0; n < columns; ++n) {
      double& x = m[i * columns + n];
      x = terms.w[i] * x + terms.b[i] * recalled[n] + (v != nullptr ? k[i] * terms.beta * v[n] : 0.0);
    }
}

}  // namespace

absl::StatusOr<AffineSpan> AffineSpan::Identity(const LinearStateShape& shape) {
  DT_RETURN_IF_ERROR(shape.Validate());
  AffineSpan span(shape);
  span.transition_.assign(TransitionFloats(shape), span.diagonal() ? 1.0f : 0.0f);
  if (!span.diagonal())
    for (int i = 0; i < shape.key_dim; ++i) span.transition_[i * shape.key_dim + i] = 1.0f;
  span.state_.assign(StateFloats(shape), 0.0f);
  return span;
}

absl::StatusOr<AffineSpan> AffineSpan::Of(const LinearStateShape& shape, const LinearStateItem& item) {
  DT_ASSIGN_OR_RETURN(AffineSpan span, Identity(shape));
  if (item.k == nullptr || item.v == nullptr || (shape.decay == DecayForm::kVector && item.log_decay == nullptr) ||
      (shape.update == StateUpdate::kDelta && item.beta == nullptr) ||
      (shape.update == StateUpdate::kRankOne && (item.b == nullptr || item.c == nullptr)))
    return InvalidArgument("affine span: an input that the update needs is null");
  std::vector<double> transition(span.transition_.begin(), span.transition_.end());
  std::vector<double> state(span.state_.begin(), span.state_.end());
  for (int row = 0; row < item.rows; ++row) {
    const TokenTerms terms(shape, item, row);
    if (span.diagonal()) {
      for (size_t i = 0; i < transition.size(); ++i) transition[i] *= terms.w[i];
    } else {
      Step(terms, nullptr, nullptr, shape.key_dim, transition);
    }
    Step(terms, item.k + row * item.k_step, item.v + row * item.v_step, shape.value_dim, state);
  }
  span.transition_ = Rounded(transition);
  span.state_ = Rounded(state);
  return span;
}

std::vector<double> AffineSpan::Times(std::span<const float> matrix, int columns) const {
  const int keys = shape_.key_dim;
  std::vector<double> out(static_cast<size_t>(keys) * columns, 0.0);
  for (int i = 0; i < keys; ++i) {
    double* row = out.data() + static_cast<size_t>(i) * columns;
    if (diagonal()) {
      const double w = transition_[transition_.size() == 1 ? 0 : i];
      for (int n = 0; n < columns; ++n) row[n] = w * matrix[i * columns + n];
      continue;
    }
    for (int j = 0; j < keys; ++j) {
      const double p = transition_[i * keys + j];
      for (int n = 0; n < columns; ++n) row[n] += p * matrix[j * columns + n];
    }
  }
  return out;
}

absl::StatusOr<AffineSpan> AffineSpan::Compose(const AffineSpan& first, const AffineSpan& second) {
  if (first.shape_ != second.shape_) return InvalidArgument("affine span: the two spans have different shapes");
  AffineSpan span(first.shape_);
  if (span.diagonal()) {
    span.transition_.resize(first.transition_.size());
    for (size_t i = 0; i < span.transition_.size(); ++i)
      span.transition_[i] = second.transition_[i] * first.transition_[i];
  } else {
    span.transition_ = Rounded(second.Times(first.transition_, span.shape_.key_dim));
  }
  std::vector<double> state = second.Times(first.state_, span.shape_.value_dim);
  for (size_t i = 0; i < state.size(); ++i) state[i] += second.state_[i];
  span.state_ = Rounded(state);
  return span;
}

absl::StatusOr<AffineSpan> AffineSpan::FromParts(const LinearStateShape& shape, std::vector<float> transition,
                                                 std::vector<float> state) {
  DT_RETURN_IF_ERROR(shape.Validate());
  if (transition.size() != TransitionFloats(shape) || state.size() != StateFloats(shape))
    return InvalidArgument("affine span: ", transition.size(), " and ", state.size(), " floats; this shape has ",
                           TransitionFloats(shape), " and ", StateFloats(shape));
  AffineSpan span(shape);
  span.transition_ = std::move(transition);
  span.state_ = std::move(state);
  return span;
}

void AffineSpan::Apply(std::span<const float> in, std::span<float> out) const {
  std::vector<double> state = Times(in, shape_.value_dim);
  for (size_t i = 0; i < state.size(); ++i) out[i] = static_cast<float>(state[i] + state_[i]);
}

}  // namespace dovetail::kernels
