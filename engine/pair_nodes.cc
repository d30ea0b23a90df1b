#include "engine/pair_nodes.h"

#include "engine/device_choice.h"
#include "scheduler/core/limits.h"

namespace dovetail::engine {

absl::StatusOr<control::WorkerMain::Nodes> PairNodes::Make(const control::WorkerMain::Joined& compute,
                                                           const control::WorkerMain::Joined& attention) {
  shared_gpu_.reset();
  if (kernels::cuda::CudaDevice* const gpu = AsGpu(device_); gpu != nullptr) {
    DT_ASSIGN_OR_RETURN(shared_gpu_,
                        exchange::SharedGpu::Create(*gpu, attention.connector.id(), scheduler::kMaxMicroBatches));
  }
  tuning_.shared_gpu = attention_.shared_gpu = shared_gpu_.get();
  tuning_.attends_elsewhere = shared_gpu_ != nullptr;  // other attention workers may join at any time
  control::WorkerMain::Nodes nodes;
  nodes.push_back(compute::MakeComputeWorker(model_, digest_, device_, compute.connector, tuning_, trace_file_));
  nodes.push_back(attention::MakeAttentionWorker(attention_, device_, attention.connector, attention.membership));
  return nodes;
}

}  // namespace dovetail::engine
