#include "kernels/cuda/experts/expert_codes.cuh"

namespace dovetail::kernels::cuda {

int LaunchExpertCodesF16(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream) {
  return LaunchExpertCodesType<WireType::kF16>(launch, device, stream);
}

}  // namespace dovetail::kernels::cuda
