#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/kv_layout.h"

namespace dovetail::attention {

inline constexpr int64_t kWireElement = 2;  // bytes of the wire types of a GPU

// Rows of one head on their way out of a KvBlock of a GPU, in the wire's type. Host memory.
struct GpuHeadRows {
  kernels::cuda::CudaKvLayout layout;
  int token = 0;  // the first one, in the block
  int rows = 0;
  std::byte* k = nullptr;  // of the first row
  std::byte* v = nullptr;
  size_t k_step = 0, v_step = 0;  // bytes from row to row
  bool bf16 = true;               // the wire's type; else f16
};

// Blocks of E4M3 are widened, which is exact. Both lie in host memory of the caller.
// Threads: reentrant; calls that write the same rows must not overlap.
void GatherBlock(const std::byte* block, const GpuHeadRows& out);

}  // namespace dovetail::attention
