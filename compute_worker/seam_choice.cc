#include "compute_worker/seam_choice.h"

#include <utility>

#include "compute_worker/host_crossing.h"
#include "compute_worker/one_gpu_crossing.h"
#include "compute_worker/peer_crossing.h"

namespace dovetail::compute {

SeamChoice::SeamChoice(const ComputeWorkerCore& core, std::vector<std::unique_ptr<Crossing>> ways)
    : core_(core), ways_(std::move(ways)), chosen_(core.options().micro_batches, {std::nullopt, ways_.back().get()}) {}

absl::Status SeamChoice::Choose(MicroBatchId id) {
  Chosen& chosen = chosen_[id.value()];
  const StepId step = core_.PlanOf(id).step;
  if (chosen.step == step) return absl::OkStatus();
  chosen = {step, ways_.back().get()};
  for (const std::unique_ptr<Crossing>& way : ways_) {
    DT_ASSIGN_OR_RETURN(const bool takes, way->Takes(id));
    if (!takes) continue;
    chosen.way = way.get();
    return absl::OkStatus();
  }
  return Internal("step ", step.value(), " crosses the seam in no way");
}

std::vector<std::unique_ptr<Crossing>> WaysOf(const ComputeWorkerCore& core, DenseBackend& dense, const GpuLinks& links,
                                              transport::Port& port, exchange::SharedGpu* shared_gpu,
                                              bool gpus_required) {
  std::vector<std::unique_ptr<Crossing>> ways;
  if (shared_gpu != nullptr) ways.push_back(std::make_unique<OneGpuCrossing>(core, dense, *shared_gpu, port));
  if (links.on_gpu()) ways.push_back(std::make_unique<PeerCrossing>(core, links, port, gpus_required));
  ways.push_back(std::make_unique<HostCrossing>(core, dense, port));
  return ways;
}

}  // namespace dovetail::compute
