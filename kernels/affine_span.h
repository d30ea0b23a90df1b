#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/linear_state.h"

namespace dovetail::kernels {

// What a span of consecutive tokens does to the state of one head: S_out = P S_in + Q, with P [key_dim, key_dim] and
// Q [key_dim, value_dim]. Without a delta rule P is diagonal and kept as the span's decays; with one it is a matrix.
// Spans compose associatively, so a sequence may be cut anywhere, its pieces summarised in parallel (on other ranks, on
// other machines) and joined: the size of a summary does not depend on its span's length.
//
// Values are f32 at rest and on the wire; products are summed in double, so that a composition is exact to 1e-6
// relative to the largest value of the result.
// Threads: thread-compatible; a value.
class AffineSpan {
 public:
  // The empty span: S_out = S_in. kInvalidArgument for a bad shape.
  static absl::StatusOr<AffineSpan> Identity(const LinearStateShape& shape);

  // Of `item`'s rows (o, pieces and positions are not looked at). kInvalidArgument as LinearState.
  static absl::StatusOr<AffineSpan> Of(const LinearStateShape& shape, const LinearStateItem& item);

  // `first`, then `second`: P = P2 P1, Q = P2 Q1 + Q2. kInvalidArgument for different shapes.
  static absl::StatusOr<AffineSpan> Compose(const AffineSpan& first, const AffineSpan& second);

  // From the parts that crossed a wire. kInvalidArgument for sizes that do not fit the shape.
  static absl::StatusOr<AffineSpan> FromParts(const LinearStateShape& shape, std::vector<float> transition,
                                              std::vector<float> state);

  // S_out for S_in [key_dim][value_dim]; `out` may be `in`.
  void Apply(std::span<const float> in, std::span<float> out) const;

  const LinearStateShape& shape() const { return shape_; }
  bool diagonal() const { return shape_.update == StateUpdate::kAdd; }
  // Decays [1] (scalar form) or [key_dim] (vector form) where P is diagonal, else P [key_dim][key_dim].
  std::span<const float> transition() const { return transition_; }
  std::span<const float> state() const { return state_; }  // Q [key_dim][value_dim]
  size_t bytes() const { return 4 * (transition_.size() + state_.size()); }

 private:
  explicit AffineSpan(const LinearStateShape& shape) : shape_(shape) {}

  // P M for M [key_dim][columns].
  std::vector<double> Times(std::span<const float> matrix, int columns) const;

  LinearStateShape shape_;
  std::vector<float> transition_, state_;
};

}  // namespace dovetail::kernels
