#pragma once
#include <optional>
#include <vector>

#include "base/status.h"
#include "plan/planner.h"
#include "plan/step_model.h"

// The layouts that a planner tries, and what they are to a simulation.
// Threads: pure.

namespace dovetail::plan {

// A layout as it is simulated.
struct Shape {
  StepModel steps;
  int replicas = 1;  // of a whole layout: each device is a server of its own, and requests go to them in turn
  int compute_workers = 1, attention_workers = 1;  // of a replica
  uint64_t kv_blocks = 0;                          // of an attention worker
};

// All layouts of the devices, or PlanInput::only, by price: 1..most of each device as servers of their own; 1..most of
// one as compute workers with 1..most of another, or of the same, as attention workers. Errors as MakePlan.
absl::StatusOr<std::vector<LayoutPlan>> ListLayouts(const PlanInput& input);

// Nothing if it can serve no request; LayoutPlan::impossible then says why.
absl::StatusOr<std::optional<Shape>> ShapeOf(const PlanInput& input, LayoutPlan& layout);

// Those that may make a difference to a split layout.
std::vector<Setting> SettingsOf(const Shape& shape);

SimulatedCluster ClusterOf(const PlanInput& input, const Shape& shape, const Setting& setting);

}  // namespace dovetail::plan
