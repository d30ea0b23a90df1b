#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/step_model.h"
#include "scheduler/core/scheduler.h"

// A cluster under a load, simulated: the real SchedulerCore in virtual time, with steps that take what a StepModel
// says. Deterministic, no I/O.
// Threads: plain values and pure functions.

namespace dovetail::plan {

struct SimulatedRequest {
  double at_s = 0;  // of its arrival, ascending
  int64_t input = 1, output = 1;
};

struct SimulatedCluster {
  int compute_workers = 1;
  int attention_workers = 1;            // 1 where StepModel::split() is false
  uint64_t kv_blocks = 0;               // of each attention worker
  scheduler::SchedulerOptions options;  // attention filled in
};

struct RequestTimes {
  bool finished = false;
  double ttft_s = 0, latency_s = 0;  // from its arrival
  int64_t input = 0, output = 0;     // tokens
  double tpot_s() const { return output > 1 ? (latency_s - ttft_s) / static_cast<double>(output - 1) : 0; }
};

struct SimulationResult {
  std::vector<RequestTimes> requests;  // as given
  double begin_s = 0, end_s = 0;       // the first arrival, the last token
  uint64_t steps = 0;
  double step_seconds = 0;    // from plan to result, all steps together
  StepParts parts;            // of all steps
  double compute_busy = 0;    // share of the time, of the compute workers
  double attention_busy = 0;  // and of the attention workers
  double most_kv_usage = 0;   // 0..1
  uint64_t preemptions = 0;
  uint64_t shortened_chunks = 0;  // SchedulerStats'
  double waiting_for_kv = 0;      // share of the steps that were planned while requests waited for room for K and V
  bool stopped = false;           // by `hopeless`: not all requests ended

  double seconds() const { return end_s - begin_s; }
};

inline constexpr uint64_t kMostSimulatedSteps = 2'000'000;

// Steps of one compute worker share it, and steps that need one attention worker share that: each device does one thing
// at a time, in the order in which steps were planned. A step ends when its own work is done, one part after the other,
// and when its last device is free for it: so micro-batches overlap. `on_token` is called with each token when it
// comes. `hopeless` is asked after each request that ended; true stops the simulation.
// Errors: kFailedPrecondition: a request cannot be served at all, as the scheduler says. kResourceExhausted: more than
// kMostSimulatedSteps.
absl::StatusOr<SimulationResult> Simulate(const StepModel& steps, const SimulatedCluster& cluster,
                                          std::span<const SimulatedRequest> requests,
                                          const std::function<bool(const RequestTimes&)>& hopeless = {},
                                          const std::function<void(size_t request, double at_s)>& on_token = {});

}  // namespace dovetail::plan
