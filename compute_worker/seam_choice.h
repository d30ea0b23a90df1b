#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/crossing.h"
#include "transport/fabric.h"

namespace dovetail::exchange {
class SharedGpu;
}

namespace dovetail::compute {

class DenseBackend;
class GpuLinks;

// Chooses how each step crosses the seam: the first of its ways that takes the step. The only place where that is
// decided (exchange/seam.h, obligation 1).
// Threads: reactor-owned.
class SeamChoice {
 public:
  // `ways` in the order of preference; the last one takes every step.
  SeamChoice(const ComputeWorkerCore& core, std::vector<std::unique_ptr<Crossing>> ways);

  // For the step that begins in the micro-batch, before its first frame. Once a step: further calls change nothing.
  // kFailedPrecondition: the step must cross in a way that it cannot take.
  absl::Status Choose(MicroBatchId id);
  // That of the micro-batch's step.
  Crossing& Of(MicroBatchId id) const { return *chosen_[id.value()].way; }

 private:
  struct Chosen {
    std::optional<StepId> step;
    Crossing* way = nullptr;
  };
  const ComputeWorkerCore& core_;
  const std::vector<std::unique_ptr<Crossing>> ways_;
  std::vector<Chosen> chosen_;  // by micro-batch
};

// The ways of a compute worker, in the order of preference. All arguments outlive them. `shared_gpu`: null unless an
// attention worker of this process has the same GPU. `gpus_required`: a step whose attention workers have GPUs must
// cross between GPUs.
// Threads: what it returns is reactor-owned.
std::vector<std::unique_ptr<Crossing>> WaysOf(const ComputeWorkerCore& core, DenseBackend& dense, const GpuLinks& links,
                                              transport::Port& port, exchange::SharedGpu* shared_gpu,
                                              bool gpus_required);

}  // namespace dovetail::compute
