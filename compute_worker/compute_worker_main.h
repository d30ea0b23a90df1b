#pragma once
#include <memory>
#include <string>

#include "compute_worker/compute_worker_node.h"
#include "control/worker_main.h"
#include "kernels/device.h"
#include "model/loaded_model.h"

namespace dovetail::compute {

// A compute worker of a cluster, for WorkerMain. `model` and `device` outlive the node. `digest` is what the model was
// announced with: a cluster that is configured for another is refused.
// A trace goes to `trace_file` when an incarnation ends; empty: none.
// Threads: thread-safe; the node that it returns has the rule of control::WorkerNode.
std::unique_ptr<control::WorkerNode> MakeComputeWorker(const model::LoadedModel& model, uint64_t digest,
                                                       kernels::Device& device, transport::Connector& connector,
                                                       const ComputeWorkerTuning& tuning = {},
                                                       const std::string& trace_file = "");

}  // namespace dovetail::compute
