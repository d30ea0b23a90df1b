#pragma once
#include <memory>
#include <vector>

#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::spatio_temporal {

// Numbers that a head has in device memory: those of its own, then zeros, up to a size that attention for many rows
// takes (cuda_attention.h) or a multiple of eight below. 72 become 80.
// Threads: pure.
int PaddedHeadDim(int64_t dim);

// Of one block: the values of BlockWeights, in bf16, where heads are padded with zeros. A product with padded weights
// makes q, k and v whose padding is zero, and one that reads o ignores what stands there.
// Ownership: must not outlive the device.
// Threads: immutable once made.
struct GpuBlockWeights {
  std::unique_ptr<kernels::Buffer> attention_norm, mlp_norm;  // [C] f32
  std::unique_ptr<kernels::Buffer> query_key_value;           // [3][heads][padded][C]
  std::unique_ptr<kernels::Buffer> out;                       // [C][heads][padded]
  std::unique_ptr<kernels::Buffer> gate_up;                   // [2][mlp][C]
  std::unique_ptr<kernels::Buffer> down;                      // [C][mlp]
};

struct GpuWeights {
  std::vector<GpuBlockWeights> spatial, temporal;  // [pairs]
  // The weights that Weights::Random has for the same config; empty ones if config.exchange_only. Blocks.
  // kResourceExhausted: no memory.
  static absl::StatusOr<GpuWeights> Random(const Config& config, kernels::cuda::CudaDevice& device);
};

}  // namespace dovetail::spatio_temporal
