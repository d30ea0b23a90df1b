#include "attention_worker/attention_backend.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention_worker/cpu/attention_executor.h"
#include "attention_worker/cuda/cuda_attention_executor.h"

namespace dovetail::attention {

absl::StatusOr<std::unique_ptr<AttentionBackend>> MakeAttentionBackend(kernels::Device& device,
                                                                       AttentionWorkerCore& core, uint32_t kv_blocks,
                                                                       int micro_batches,
                                                                       exchange::SharedGpu* shared_gpu,
                                                                       KvStorage storage, bool deterministic) {
  if (auto* gpu = dynamic_cast<kernels::cuda::CudaDevice*>(&device); gpu != nullptr)
    return CudaAttentionExecutor::Create(*gpu, core, kv_blocks, micro_batches, shared_gpu, storage, deterministic);
  if (deterministic)
    return FailedPrecondition("--deterministic: layers run on GPUs, and ", device.name(),
                              " attends in another order than they; attend on GPUs of their kind");
  if (shared_gpu != nullptr) return Internal(device.name(), " is no GPU to be shared");
  return AttentionExecutor::Create(device, core, kv_blocks, micro_batches, storage);
}

absl::Status CheckKvStorage(const proto::AttentionTable& table, KvStorage storage, std::string_view gpu) {
  if (storage == KvStorage::kAsSent) return absl::OkStatus();
  const std::string flag = absl::StrCat("--kv-cache-dtype ", std::string(Name(storage)));
  if (storage == KvStorage::kInt8 && !gpu.empty())
    return Unimplemented(flag, ": K and V in int8 lie on CPUs, and ", std::string(gpu),
                         " is a GPU; take fp8_e4m3 or bfloat16, or attend on CPUs");
  if (table.has_linear())
    return Unimplemented(flag, ": not for models with linear states, which share the blocks; take bfloat16");
  if (!gpu.empty()) return absl::OkStatus();
  for (const proto::SoftmaxSpec& spec : table.views)
    if (spec.kv != DType::kBF16)
      return InvalidArgument(flag, ": K and V of 8 bits come as bfloat16, and this model's compute workers send ",
                             std::string(Name(spec.kv)), "; start them with the same flag");
  return absl::OkStatus();
}

size_t KvBlockBytes(const proto::AttentionTable& table, KvStorage storage) {
  const size_t bytes = AttentionExecutor::BlockBytes(table, storage);  // E4M3 may be padded on GPUs
  return storage == KvStorage::kE4M3 ? std::max(bytes, CudaAttentionExecutor::BlockBytes(table, storage)) : bytes;
}

}  // namespace dovetail::attention
