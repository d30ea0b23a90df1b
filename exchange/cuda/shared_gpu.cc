#include "exchange/cuda/shared_gpu.h"

namespace dovetail::exchange {

absl::StatusOr<std::unique_ptr<SharedGpu>> SharedGpu::Create(kernels::cuda::CudaDevice& device, NodeId attention,
                                                             int micro_batches) {
  DT_ASSIGN_OR_RETURN(kernels::cuda::CudaStream* const stream, device.WorkerStream());
  return std::unique_ptr<SharedGpu>(new SharedGpu(*stream, attention, micro_batches));
}

SharedGpu::~SharedGpu() { (void)stream_.SynchronizeStatus(); }

void SharedGpu::Carry(MicroBatchId id, StepId step) {
  ++steps_carried_;
  steps_[id.value()].carried = step;
  steps_[id.value()].targets.clear();
}

bool SharedGpu::Carries(MicroBatchId id, StepId step) const {
  return id.value() < steps_.size() && steps_[id.value()].carried == step;
}

const SharedGpu::AppendTarget* SharedGpu::TargetOf(MicroBatchId id, int op) const {
  const auto& targets = steps_[id.value()].targets;
  const auto it = targets.find(op);
  return it == targets.end() ? nullptr : &it->second;
}

}  // namespace dovetail::exchange
