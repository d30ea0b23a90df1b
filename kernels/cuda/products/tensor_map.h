#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/backend_abi.h"

// Tensor maps of matrices that wgmma multiplies. Host code of kernels' launches only.

namespace dovetail::kernels::cuda {

inline constexpr int kMapColumns = 64;  // of a box: rows of 128 bytes, swizzled as wgmma takes them

// Rows of 16-bit elements; `stride` in elements.
struct MappedRows {
  const void* matrix = nullptr;
  GemmType type = GemmType::kBF16;
  int64_t rows = 0, columns = 0, stride = 0;
};

// Boxes of kMapColumns columns by `box_rows` rows; what lies outside of the matrix is read as zero. False: the driver
// has no tensor maps, or refuses the sizes (the address and stride * 2 must be multiples of 16, box_rows at most 256).
// Threads: thread-safe.
inline bool MakeRowsMap(const MappedRows& of, int box_rows, CUtensorMap& map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = []() -> Encode {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(of.columns), static_cast<cuuint64_t>(of.rows)};
  const cuuint64_t steps[1] = {static_cast<cuuint64_t>(of.stride) * 2};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)}, every[2] = {1, 1};
  const CUtensorMapDataType element =
      of.type == GemmType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(&map, element, 2, const_cast<void*>(of.matrix), sizes, steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dovetail::kernels::cuda
