#pragma once
#include <cstddef>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// backend_abi.h's gemm_*: cuBLASLt, opened at run time, and skinny_gemm.h where x has at most 8 rows. Of cuBLASLt's
// algorithms one is chosen once per shape, by time up to 512 rows, and kept.
// Threads: thread-safe; GemmClose() comes after all other calls with that handle.
int GemmOpen(int device, size_t workspace_bytes, void** gemm, char* text, size_t text_bytes);
int GemmClose(void* gemm);
int GemmRun(void* gemm, const GemmCall* call, void* stream);

}  // namespace dovetail::kernels::cuda
