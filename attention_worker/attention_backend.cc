#include "attention_worker/attention_backend.h"

#include "attention_worker/cpu/attention_executor.h"
#include "attention_worker/cuda/cuda_attention_executor.h"

namespace dovetail::attention {

absl::StatusOr<std::unique_ptr<AttentionBackend>> MakeAttentionBackend(kernels::Device& device,
                                                                       AttentionWorkerCore& core, uint32_t kv_blocks,
                                                                       int micro_batches,
                                                                       exchange::SharedGpu* shared_gpu,
                                                                       KvStorage storage) {
  if (auto* gpu = dynamic_cast<kernels::cuda::CudaDevice*>(&device); gpu != nullptr)
    return CudaAttentionExecutor::Create(*gpu, core, kv_blocks, micro_batches, shared_gpu, storage);
  if (storage == KvStorage::kE4M3)
    return Unimplemented("--kv-cache-dtype fp8_e4m3: K and V of 8 bits lie on GPUs, and ", device.name(),
                         " is none; take bfloat16");
  if (shared_gpu != nullptr) return Internal(device.name(), " is no GPU to be shared");
  return AttentionExecutor::Create(device, core, kv_blocks, micro_batches);
}

size_t KvBlockBytes(const proto::AttentionTable& table, KvStorage storage) {
  return storage == KvStorage::kE4M3 ? CudaAttentionExecutor::BlockBytes(table, storage)
                                     : AttentionExecutor::BlockBytes(table);
}

}  // namespace dovetail::attention
