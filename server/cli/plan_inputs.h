#pragma once
#include "base/status.h"
#include "plan/planner.h"
#include "server/cli/plan_command.h"

namespace dovetail::cli {

// Reads all that the flags name. Errors as RunPlan.
// Threads: thread-safe; blocks on files.
absl::StatusOr<plan::PlanInput> ReadPlanInput(const PlanFlags& flags);

}  // namespace dovetail::cli
