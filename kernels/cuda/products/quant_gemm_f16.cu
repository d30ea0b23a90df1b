#include "kernels/cuda/products/quant_gemm.cuh"

namespace dovetail::kernels::cuda {

int LaunchQuantGemmF16(const QuantPart& part, const QuantDevice& device, void* stream) {
  return LaunchQuantType<WireType::kF16>(part, device, static_cast<cudaStream_t>(stream));
}

}  // namespace dovetail::kernels::cuda
