#pragma once
#include "proto/control/dovetail_control.pb.h"
#include "scheduler/control_members.h"
#include "scheduler/core/scheduler.h"

// Parts of the message in which a scheduler tells servers and `dovetail status` how the cluster does.

namespace dovetail::scheduler {

// The counts of the core and of its shell; all other fields stay as they are.
// Threads: pure.
void DescribeScheduler(const SchedulerStats& stats, control::v1::Stats& out);

// What a worker said last.
// Threads: pure.
void DescribeLoad(const Member& member, control::v1::WorkerLoad& load);

}  // namespace dovetail::scheduler
