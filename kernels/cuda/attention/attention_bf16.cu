#include "kernels/cuda/attention/attention_kernel.cuh"

namespace dovetail::kernels::cuda {

int LaunchAttentionBF16(AttentionLaunch launch, const DeviceLimits& limits, void* stream) {
  return LaunchTyped<KvType::kBF16>(launch, limits, stream);
}

}  // namespace dovetail::kernels::cuda
