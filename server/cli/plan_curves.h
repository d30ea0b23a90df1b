#pragma once
#include <optional>
#include <vector>

#include "base/status.h"
#include "plan/planner.h"

// What becomes of a plan's layouts under other loads and other objectives: the same plan, made again.
// Threads: pure.

namespace dovetail::cli {

// The layouts that a plan is about: its cheapest whole and its cheapest split one; where none meets the SLO, the first
// of each kind that can serve the load. Indexes into Plan::tried.
std::vector<size_t> ShownLayouts(const plan::Plan& plan);

struct AtLoad {
  double times = 1;                       // as fast as the load of the plan
  std::vector<plan::LayoutPlan> layouts;  // of ShownLayouts, simulated to their end
};
struct AtSlo {
  double times = 1;  // its limits are so many times those of the plan
  // Of the layout of each kind in ShownLayouts: dollars for a million output tokens at the largest load within the
  // limits; absent: it does not meet them at the load of the plan, or there is no such layout.
  struct Cost {
    double low = 0, high = 0;
  };
  std::optional<Cost> whole, split;
};
struct PlanCurves {
  std::vector<AtLoad> loads;  // empty where all requests come at once, or no layout can serve them
  std::vector<AtSlo> slos;    // empty without a limit, or where no layout can serve the load
};

// Takes about ten times as long as the plan itself. Errors as plan::MakePlan.
absl::StatusOr<PlanCurves> CurvesOf(const plan::PlanInput& input, const plan::Plan& plan);

}  // namespace dovetail::cli
