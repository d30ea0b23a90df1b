#include "kernels/cuda/products/quant_gemm.cuh"

namespace dovetail::kernels::cuda {

int LaunchQuantGemmBF16(const QuantPart& part, const QuantDevice& device, void* stream) {
  return LaunchQuantType<WireType::kBF16>(part, device, static_cast<cudaStream_t>(stream));
}

}  // namespace dovetail::kernels::cuda
