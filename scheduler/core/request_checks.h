#pragma once
#include "base/status.h"
#include "requests/generation.h"
#include "scheduler/core/scheduler.h"

namespace dovetail::scheduler {

// Whether the scheduler can take a request at all, whatever else it does.
// Errors: kInvalidArgument names the field, what it may be, and what to do.
// Threads: pure.
absl::Status CheckRequest(const requests::GenerationRequest& request, const SchedulerOptions& options);

}  // namespace dovetail::scheduler
