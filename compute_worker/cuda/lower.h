#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "compute_worker/cuda/launch_list.h"
#include "model/layer_steps.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// Of one of a step's weights, several stacked below each other counting as one.
struct WeightShape {
  int64_t rows = 0, cols = 0;         // 0: the step has none
  bool kept = false, biased = false;  // as ProductRecord has them
};

// What lowering reads; valid during the call.
struct LowerInput {
  const std::vector<model::LayerStep>& steps;
  const proto::AttentionTable& table;
  int64_t hidden = 0;
  WireType type = WireType::kBF16;  // of activations
  std::function<WeightShape(WeightName)> shape_of;
};

// The launches of all steps, each op by itself: what runs together is for fuse.h to say. A KeyValueProjection's are
// with those of the QueryProjection before it, since one product gives q, k and v; an AttentionCut has none.
// Errors: kUnimplemented or kInternal names a step that does not run on a GPU.
// Threads: pure, thread-safe.
absl::StatusOr<LaunchList> Lower(const LowerInput& input);

}  // namespace dovetail::compute
