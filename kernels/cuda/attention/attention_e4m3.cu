#include "kernels/cuda/attention/attention_kernel.cuh"

namespace dovetail::kernels::cuda {

int LaunchAttentionE4M3(AttentionLaunch launch, const DeviceLimits& limits, void* stream) {
  return LaunchTyped<KvType::kE4M3>(launch, limits, stream);
}

}  // namespace dovetail::kernels::cuda
