#pragma once
#include <cuda.h>

#include <cstdint>

// Thread blocks of a cluster: barriers that count arrivals from all of them, and copies that go to several. Device code
// only, of sm_90a.

namespace dovetail::kernels::cuda {
#if __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all thread blocks of the cluster.
__device__ __forceinline__ void ClusterMeets() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the barrier that lies at the same place in thread block `rank`, which brings nothing but the news that products
// have been done: a release to the whole cluster would cost a fence of the GPU.
__device__ __forceinline__ void ArriveAt(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar),
      "r"(rank)
      : "memory");
}
// What is read once, what some thread blocks read, and what all of them do.
__device__ __forceinline__ uint64_t EvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t EvictNormal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t EvictLast() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A box of the map from (column, row) on, to the same place in all thread blocks of `mask`, each of which is told. What
// lies outside of the matrix is zero.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t bar,
                                        uint32_t mask, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(bar), "h"(static_cast<uint16_t>(mask)), "l"(policy)
      : "memory");
}

#endif
}  // namespace dovetail::kernels::cuda
