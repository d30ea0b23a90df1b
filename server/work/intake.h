#pragma once
#include "server/work/admission.h"
#include "server/work/work_queue.h"

namespace dovetail::server {

// What the APIs of a server share, so that one limit holds for all of them: the requests that wait to be read, and what
// each tenant has in the engine. Shared by them; it must outlive whatever has tasks in the queue. Thread-safe.
struct Intake {
  Intake(int threads, const WorkLimits& limits) : queue(threads, limits) {}

  Admission admission;
  WorkQueue queue;  // ends first
};

}  // namespace dovetail::server
