#include "kernels/cuda/experts/expert_codes.cuh"

namespace dovetail::kernels::cuda {

int LaunchExpertCodesBF16(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream) {
  return LaunchExpertCodesType<WireType::kBF16>(launch, device, stream);
}

}  // namespace dovetail::kernels::cuda
