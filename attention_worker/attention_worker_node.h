#pragma once
#include <memory>
#include <vector>

#include "attention_worker/attention_executor.h"
#include "attention_worker/core/attention_worker_core.h"
#include "base/status.h"
#include "kernels/device.h"
#include "transport/fabric.h"

namespace dovetail::attention {

// An attention worker: core + device + port. Owned by one event loop, which calls Poll().
class AttentionWorkerNode final : public transport::FrameHandler {
 public:
  // `device` and `port` outlive the node. kInvalidArgument for options out of range, kResourceExhausted if the KV arena
  // does not fit.
  static absl::StatusOr<std::unique_ptr<AttentionWorkerNode>> Create(const proto::AttentionTable& table,
                                                                     const AttentionWorkerOptions& options,
                                                                     kernels::Device& device, transport::Port& port);

  // Handles what has arrived, at most kFramesPerPoll frames; returns how many. Does not wait for frames; blocks for as
  // long as the attention that they start takes. What fails inside a step is logged here and answered with
  // kStepRefused.
  int Poll() { return port_.Poll(*this, kFramesPerPoll); }

  void OnFrame(const transport::Delivery& delivery) override;

  const AttentionWorkerCore& core() const { return core_; }
  AttentionWorkerCore& core() { return core_; }

 private:
  static constexpr int kFramesPerPoll = 64;

  AttentionWorkerNode(const proto::AttentionTable& table, const AttentionWorkerOptions& options, transport::Port& port)
      : options_(options), core_(table, options), port_(port) {}

  absl::Status Perform(Action& action);
  void RefuseStep(const transport::Delivery& delivery, const absl::Status& status);

  const AttentionWorkerOptions options_;
  AttentionWorkerCore core_;
  transport::Port& port_;
  std::unique_ptr<AttentionExecutor> executor_;
  std::vector<Action> actions_;
};

}  // namespace dovetail::attention
