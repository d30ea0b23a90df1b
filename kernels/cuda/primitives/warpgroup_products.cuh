#pragma once
#include <cstdint>

// Asynchronous products of a warpgroup, four warps from a multiple of four on (wgmma: PTX ISA 9.7.15). Device code
// only.

namespace dovetail::kernels::cuda {

// What ordinary stores and copies have brought (by this thread, or announced to it) is there for products begun later.
__device__ __forceinline__ void FenceProducts() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Around products: accumulators must not be touched from the first product until WaitForProducts.
__device__ __forceinline__ void BeginProducts() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void EndProducts() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all but the last kPending that ended have been done.
template <int kPending = 0>
__device__ __forceinline__ void WaitForProducts() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

#if __CUDA_ARCH_FEAT_SM90_ALL
// A matrix's descriptor: groups of eight rows of 128 or 64 bytes lie one behind the other.
template <int kRowBytes>
__device__ __forceinline__ uint64_t Descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return kSwizzle << 62 | static_cast<uint64_t>(8 * kRowBytes / 16) << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}
#endif

}  // namespace dovetail::kernels::cuda
