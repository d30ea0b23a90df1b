#pragma once
#include <memory>
#include <string>
#include <utility>

#include "attention_worker/attention_worker_main.h"
#include "compute_worker/compute_worker_main.h"
#include "control/worker_main.h"
#include "exchange/cuda/shared_gpu.h"

namespace dovetail::engine {

// The two nodes of a pair: a compute worker and an attention worker of one process and device. On a GPU, steps whose
// sequences lie whole on the pair stay there (OnOneGpu in exchange/seam.h).
// Threads: thread-compatible; the nodes have the rule of control::WorkerNode, and one event loop.
class PairNodes {
 public:
  // model, digest, device, tuning, compute_trace_file: as MakeComputeWorker takes them.
  // attention:  as MakeAttentionWorker takes it. Of both, shared_gpu is set here.
  // Ownership:  `model`, `device` and the PairNodes outlive the nodes.
  PairNodes(const model::LoadedModel& model, uint64_t digest, kernels::Device& device,
            compute::ComputeWorkerTuning tuning, std::string compute_trace_file,
            attention::AttentionWorkerMainOptions attention)
      : model_(model),
        digest_(digest),
        device_(device),
        tuning_(std::move(tuning)),
        trace_file_(std::move(compute_trace_file)),
        attention_(std::move(attention)) {}

  // For WorkerMain: those of one incarnation. The nodes of the one before are gone. Errors: the GPU's.
  absl::StatusOr<control::WorkerMain::Nodes> Make(const control::WorkerMain::Joined& compute,
                                                  const control::WorkerMain::Joined& attention);

  // Steps that stayed on the GPU, of the last incarnation. Once its nodes are gone.
  uint64_t steps_on_gpu() const { return shared_gpu_ == nullptr ? 0 : shared_gpu_->steps_carried(); }

 private:
  const model::LoadedModel& model_;
  const uint64_t digest_;
  kernels::Device& device_;
  compute::ComputeWorkerTuning tuning_;
  const std::string trace_file_;
  attention::AttentionWorkerMainOptions attention_;
  std::unique_ptr<exchange::SharedGpu> shared_gpu_;  // of the last incarnation; null on a CPU
};

}  // namespace dovetail::engine
