#include "kernels/cuda/attention/attention_kernel.cuh"

namespace dovetail::kernels::cuda {

int LaunchAttentionF16(AttentionLaunch launch, const DeviceLimits& limits, void* stream) {
  return LaunchTyped<KvType::kF16>(launch, limits, stream);
}

}  // namespace dovetail::kernels::cuda
