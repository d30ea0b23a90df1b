#pragma once
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/dense_executor.h"
#include "compute_worker/token_sampler.h"
#include "kernels/device.h"
#include "model/loaded_model.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// A compute worker: core + device + port + clock. Owned by one event loop, which calls Poll().
class ComputeWorkerNode final : public transport::FrameHandler {
 public:
  // All references outlive the node. `scheduler` gets the step results.
  ComputeWorkerNode(const model::LoadedModel& model, const proto::AttentionTable& table,
                    const ComputeWorkerOptions& options, NodeId scheduler, kernels::Device& device,
                    transport::Port& port, Clock& clock);

  void AddAttentionWorker(const AttentionWorkerAddress& address) { core_.AddAttentionWorker(address); }

  // Its steps end as failed by it; what else it sends is dropped. Not from inside Poll().
  void LoseAttentionWorker(WorkerId worker, Epoch epoch) { Feed(AttentionWorkerLost{worker, epoch}); }

  // Handles what has arrived; returns how many frames.
  int Poll() { return port_.Poll(*this, kFramesPerPoll); }

  // Attention workers whose partials a step has waited for five times as long as usual, and at least 100 ms. They may
  // be lost, or just slow. To be asked when Poll() has handled everything that is there.
  std::vector<NodeId> Overdue() const;

  void OnFrame(const transport::Delivery& delivery) override;

  const ComputeWorkerCore& core() const { return core_; }

 private:
  static constexpr int kFramesPerPoll = 64;

  struct Timer {  // of one micro-batch's step
    absl::Time begun, waiting_since, sent;  // sent: q of the op at hand
    absl::Duration dense, waiting, sampling;
  };

  // Gives the core an event and performs what it asks for, until nothing is left to do.
  void Feed(Event event);
  absl::Status Perform(Action& action);
  absl::Status Perform(SendStepBegin& send);
  absl::Status Perform(RunDense& run);
  absl::Status Perform(Sample& sample);
  absl::Status Perform(FinishStep& finish);
  absl::Status SendTensors(MicroBatchId id, int op, proto::FrameType type);
  void FailStep(MicroBatchId id, const absl::Status& status);

  const NodeId scheduler_;
  ComputeWorkerCore core_;
  DenseExecutor dense_;
  TokenSampler sampler_;
  transport::Port& port_;
  Clock& clock_;
  std::vector<Timer> timers_;
  std::vector<absl::Duration> waits_;  // the last ones, from q to a partial, in a ring
  size_t next_wait_ = 0;
  std::vector<Action> actions_;  // still to be performed
};

}  // namespace dovetail::compute
