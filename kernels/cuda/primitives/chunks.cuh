#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// 16 bytes to shared memory, at a multiple of 16. Device code only.

namespace dovetail::kernels::cuda {

// Behind this thread's back: copied from device memory, or zeros.
__device__ __forceinline__ void ChunkCopyOrZero(uint32_t to, const void* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0) : "memory");
}
// Until this thread's have been done.
__device__ __forceinline__ void WaitForChunkCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void StoreShared16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace dovetail::kernels::cuda
