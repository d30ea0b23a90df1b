#pragma once
#include <vector>

#include "plan/planner.h"
#include "report/figure.h"
#include "server/cli/figures.h"
#include "server/cli/plan_curves.h"
#include "server/cli/plan_measured.h"

namespace dovetail::cli {

// The report of `dovetail plan --report`. `break_even`: of the plan's cheapest split against its cheapest whole layout;
// empty without both.
// Threads: pure.
report::Report PlanReport(const plan::PlanInput& input, const plan::Plan& plan, const PlanCurves& curves,
                          const std::vector<MeasuredLoad>& measured, const std::vector<SplitAgainstWhole>& break_even);

// The same as for Plan::break_even. Errors as plan::RelativeCostOf.
absl::StatusOr<std::vector<SplitAgainstWhole>> BreakEvenOf(const plan::PlanInput& input, const plan::Plan& plan);

}  // namespace dovetail::cli
