#include "attention_worker/attention_backend.h"

#include "attention_worker/attention_executor.h"
#include "attention_worker/cuda/cuda_attention_executor.h"

namespace dovetail::attention {

absl::StatusOr<std::unique_ptr<AttentionBackend>> MakeAttentionBackend(kernels::Device& device,
                                                                       AttentionWorkerCore& core, uint32_t kv_blocks,
                                                                       int micro_batches, bool payloads_on_device) {
  if (auto* gpu = dynamic_cast<kernels::cuda::CudaDevice*>(&device); gpu != nullptr)
    return CudaAttentionExecutor::Create(*gpu, core, kv_blocks, micro_batches, payloads_on_device);
  if (payloads_on_device) return Internal("payloads cannot stay on the CPU's device");
  return AttentionExecutor::Create(device, core, kv_blocks, micro_batches);
}

}  // namespace dovetail::attention
