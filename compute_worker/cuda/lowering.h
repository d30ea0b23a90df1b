#pragma once
#include <optional>
#include <utility>

#include "compute_worker/cuda/lower.h"

namespace dovetail::compute {

inline constexpr int64_t kWireBytes = 2;  // of an element in a GPU's wire types

// How lower.h does it: appends the launches of one step after the other. Its parts lie in lower.cc, lower_heads.cc and
// lower_experts.cc.
// Ownership: `input` outlives it.
// Errors: those of Lower.
// Threads: thread-compatible.
class Lowering {
 public:
  explicit Lowering(const LowerInput& input);
  absl::Status AddStep(size_t index);
  LaunchList Take() { return std::move(list_); }

 private:
  // The widths of an op's heads in elements.
  struct HeadWidths {
    int64_t q = 0, k = 0, v = 0;
    int64_t all() const { return q + k + v; }
  };

  absl::Status Add(const model::InputNorm& step);
  absl::Status Add(const model::QueryProjection& step);
  absl::Status Add(const model::KeyValueProjection&) { return absl::OkStatus(); }
  absl::Status Add(const model::AttentionCut&) { return absl::OkStatus(); }
  absl::Status Add(const model::OutputProjection& step);
  absl::Status Add(const model::GatedMlp& step);
  absl::Status Add(const model::ExpertMlp& step);

  // h = norm(x), or x; then x begins anew as restart * h.
  void AddInput(const std::optional<model::RmsNorm>& norm, const std::optional<float>& restart);
  // x += scale post_norm(in W + b), by way of `aside`.
  void AddScaled(Weight weight, const Place& in, const std::optional<model::RmsNorm>& post_norm, float scale,
                 Tensor aside);
  void AddProduct(Weight weight, const Place& in, const Place& out, ProductResult result, int64_t out_step = 0);
  void AddLowRank(Weight low, Weight weight, const Place& in, const Place& out, ProductResult result);
  void AddActivation(model::Activation activation, Tensor gate_up, Tensor out, int64_t size, int64_t times);

  // lower_heads.cc
  HeadWidths WidthsOf(int op) const;
  void AddWholeNorm(const std::optional<model::RmsNorm>& norm, Weight weight, int64_t at, int64_t width, int dim,
                    int64_t step);
  void AddSoftmaxHeads(const model::QueryProjection& step, const model::KeyValueProjection& next);
  void AddStateHeads(const model::QueryProjection& step, const model::KeyValueProjection& next);
  void AddStateGates(const model::StateGates& gates, int op);
  void AddLatentHeads(const model::LatentKeyValue& latent, const HeadWidths& widths);
  absl::Status AddOutputGate(const model::OutputProjection& step);

  // lower_experts.cc
  void AddRoute(const model::ExpertMlp& step);
  void AddPairs(const model::ExpertMlp& step, Tensor in, int64_t width);
  int32_t MayGroup(int64_t experts) const;
  int32_t KeepsExperts() const;
  void AddShared(const model::ExpertMlp& step);

  template <typename Record>
  void Emit(const Record& record) {
    list_.push_back({static_cast<int32_t>(index_), record});
  }
  static Place At(Tensor tensor) { return {.tensor = tensor}; }
  WeightName Name(Weight weight) const { return {weight, static_cast<int32_t>(index_)}; }
  // kNone where the step has no such weight.
  WeightName NameIf(bool has, Weight weight) const { return has ? Name(weight) : WeightName{}; }
  WeightShape ShapeOf(Weight weight) const { return input_.shape_of(Name(weight)); }
  const proto::SoftmaxSpec& SpecOf(int op) const { return input_.table.softmax(input_.table.op_group[op]); }
  int64_t hidden() const { return input_.hidden; }

  const LowerInput& input_;
  const bool keeps_input_;  // later pieces of a layer read its h
  size_t index_ = 0;
  LaunchList list_;
};

}  // namespace dovetail::compute
