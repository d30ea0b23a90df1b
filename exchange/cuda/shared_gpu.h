#pragma once
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/step_work.h"

namespace dovetail::exchange {

// What a compute worker and an attention worker of one process and GPU share for the steps that cross the seam on that
// GPU (OnOneGpu in exchange/seam.h): a stream, each step's launches, and where its new K and V belong. Both workers are
// given it when they are made.
//
// For a step of a micro-batch, in this order:
//   compute node        Carry(id, step), before it sends kStepBegin
//   compute backend     work(id).Begin, then adds its pieces
//   attention node      Carries(id, step): the step crosses here
//   attention backend   SetAppendTarget for an op whose K and V the compute worker may write; adds its pieces
//   compute backend     work(id).Launch
//
// Threads: reactor-owned; both workers have the same event loop.
// Ownership: the device outlives it; it outlives both workers.
class SharedGpu {
 public:
  // Where the new K and V of an op belong: what KvAppendLaunch takes. Device memory of the attention worker.
  struct AppendTarget {
    const kernels::cuda::DeviceAttentionItem* items = nullptr;
    const int32_t* positions = nullptr;
    const int32_t* row_items = nullptr;
    int64_t kv_offset = 0;
    kernels::cuda::CudaKvLayout layout;
  };

  // `attention`: the node of the attention worker.
  static absl::StatusOr<std::unique_ptr<SharedGpu>> Create(kernels::cuda::CudaDevice& device, NodeId attention,
                                                           int micro_batches);
  ~SharedGpu();  // waits for the stream: recorded work may still run

  NodeId attention() const { return attention_; }
  kernels::cuda::CudaStream& stream() { return stream_; }

  void Carry(MicroBatchId id, StepId step);
  bool Carries(MicroBatchId id, StepId step) const;
  uint64_t steps_carried() const { return steps_carried_; }  // so far

  kernels::cuda::StepWork& work(MicroBatchId id) { return steps_[id.value()].work; }

  // In a step that is not immediate, the owner of the KV blocks may say where K and V of an op belong. What computes
  // them writes them there, and the owner adds no launch of its own for that.
  void SetAppendTarget(MicroBatchId id, int op, const AppendTarget& target) { steps_[id.value()].targets[op] = target; }
  // Known when launches are enqueued. Null: K and V go to their payload.
  const AppendTarget* TargetOf(MicroBatchId id, int op) const;

 private:
  struct Step {
    std::optional<StepId> carried;
    kernels::cuda::StepWork work;
    std::map<int, AppendTarget> targets;  // by op
  };
  SharedGpu(kernels::cuda::CudaStream& stream, NodeId attention, int micro_batches)
      : stream_(stream), attention_(attention), steps_(micro_batches) {}

  kernels::cuda::CudaStream& stream_;
  const NodeId attention_;
  uint64_t steps_carried_ = 0;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::exchange
