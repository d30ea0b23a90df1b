#pragma once
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "compute_worker/cuda/lower.h"

// Steps of small models for lowering and its rules: shapes without weights, so no GPU.

namespace dovetail::compute::testing {

inline constexpr int64_t kHidden = 64, kIntermediate = 96;

inline model::RmsNorm NormOf(size_t size) { return {std::vector<float>(size, 1.0f), 1e-5f}; }

inline model::Projection Shape(int64_t rows, int64_t cols) {
  model::Projection projection;
  projection.weights = kernels::PackedWeights::ShapeOf(rows, cols);
  return projection;
}

// What a model's steps are lowered from.
struct SmallModel {
  std::vector<model::LayerStep> steps;
  std::vector<proto::AttentionSpec> ops;
  std::map<std::pair<int, Weight>, WeightShape> shapes;  // by step

  // Adds a step with weights of these shapes; returns its index.
  int Add(model::LayerStep step, const std::vector<std::pair<Weight, WeightShape>>& weights = {}) {
    const int index = static_cast<int>(steps.size());
    steps.push_back(std::move(step));
    for (const auto& [weight, shape] : weights) shapes[{index, weight}] = shape;
    return index;
  }

  absl::StatusOr<LaunchList> Lowered() const {
    DT_ASSIGN_OR_RETURN(const proto::AttentionTable table,
                        proto::AttentionTable::Build(ops, std::vector<proto::LinearConstants>(ops.size())));
    return Lower({.steps = steps, .table = table, .hidden = kHidden, .shape_of = [this](WeightName name) {
                    const auto it = shapes.find({name.step, name.weight});
                    return it != shapes.end() ? it->second : WeightShape{};
                  }});
  }
};

// 4 query heads and 2 KV heads of 16 dimensions: 64, 32 and 32 wide.
inline proto::SoftmaxSpec Softmax() {
  return {.query_heads = 4, .kv_heads = 2, .key_dim = 16, .value_dim = 16, .scale = 0.25f};
}

// InputNorm, QueryProjection, KeyValueProjection, AttentionCut, OutputProjection, GatedMlp: steps 0 to 5.
inline SmallModel DenseLayer() {
  SmallModel small;
  small.ops = {Softmax()};
  small.Add(model::InputNorm{.norm = NormOf(kHidden)});
  small.Add(model::QueryProjection{.op = 0, .rope = 0}, {{Weight::kFirst, {128, kHidden}}});
  small.Add(model::KeyValueProjection{.op = 0, .rope = 0});
  small.Add(model::AttentionCut{0});
  small.Add(model::OutputProjection{.op = 0}, {{Weight::kFirst, {kHidden, 64}}});
  small.Add(model::GatedMlp{.norm = NormOf(kHidden)},
            {{Weight::kFirst, {2 * kIntermediate, kHidden}}, {Weight::kSecond, {kHidden, kIntermediate}}});
  return small;
}

// A short name of each kind of record, in the order of LaunchRecord.
inline std::string NameOf(const LaunchRecord& record) {
  static constexpr const char* kNames[] = {
      "product",       "norm",  "combine",        "copy",          "clear",       "gated activation", "activation",
      "gated product", "heads", "seam",           "state inputs",  "state gates", "output gate",      "join keys",
      "route",         "place", "expert product", "gated experts", "expert sum",  "summed experts",   "gated add"};
  static_assert(std::size(kNames) == std::variant_size_v<LaunchRecord>);
  const auto* const seam = std::get_if<SeamRecord>(&record);
  if (seam == nullptr) return kNames[record.index()];
  static constexpr const char* kCalls[] = {"before heads", "leave", "arrive"};
  return kCalls[static_cast<int>(seam->call)];
}

inline std::vector<std::string> NamesOf(const LaunchList& list, int step = -1) {
  std::vector<std::string> names;
  for (const Launch& launch : list)
    if (step < 0 || launch.step == step) names.push_back(NameOf(launch.record));
  return names;
}

// Words that tell a list from others: steps and records.
inline std::vector<uint64_t> WordsOf(const LaunchList& list) {
  std::vector<uint64_t> words;
  for (const Launch& launch : list) {
    words.push_back(static_cast<uint64_t>(launch.step));
    AppendKey(launch.record, words);
  }
  return words;
}

// The nth record of a kind.
template <typename Record>
const Record& The(const LaunchList& list, int nth = 0) {
  for (const Launch& launch : list)
    if (const auto* const record = std::get_if<Record>(&launch.record); record != nullptr && nth-- == 0) return *record;
  ADD_FAILURE() << "the list has no such record";
  static const Record none{};
  return none;
}

}  // namespace dovetail::compute::testing
