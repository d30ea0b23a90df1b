#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// One-instruction wrappers: barriers in shared memory, asynchronous copies, tensor core products. Device code only.

namespace dovetail::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers of shared memory (mbarrier). A phase completes when `count` arrivals and all announced bytes are there.
__device__ __forceinline__ void BarrierInit(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ bool BarrierTest(uint32_t bar, uint32_t parity) {
  uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
#endif
  return done != 0;
}
// Lanes may leave at different times: a warp that waits together needs __syncwarp() behind it.
__device__ __forceinline__ void BarrierWait(uint32_t bar, uint32_t parity) {
  while (!BarrierTest(bar, parity)) {
  }
}
// Arrives once this thread's copies so far have landed; counts as one of the barrier's arrivals.
__device__ __forceinline__ void BarrierArriveAfterCopies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void BarrierArriveExpect(uint32_t bar, uint32_t bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
}
// Source and destination 16-byte aligned, bytes a multiple of 16. Read once: other data should stay in the L2.
__device__ __forceinline__ void BulkCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "policy; }" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}
#else
__device__ __forceinline__ void ChunkCopy(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
#endif

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Four 8 x 8 matrices of 16 bits, whose rows of 16 bytes lanes 0..7, 8..15, 16..23 and 24..31 name. Of each, lane i
// gets elements 2 * (i % 4) and the next of row i / 4; transposed, of column i / 4.
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct BF16Math {
  static constexpr uint32_t kOnes = 0x3f803f80u;
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
  // d += a b, 16x8x16; a[4], b0 and b1 as PTX's mma.m16n8k16 lays them out.
  static __device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct F16Math {
  static constexpr uint32_t kOnes = 0x3c003c00u;
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Two E4M3 numbers (the low 16 bits) as two f16.
__device__ __forceinline__ uint32_t WidenE4M3(uint32_t pair) {
  uint32_t out;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 t, u; mov.b32 {t, u}, %1; cvt.rn.f16x2.e4m3x2 %0, t; }" : "=r"(out) : "r"(pair));
#else
  // Sign, exponent and mantissa moved into place are the number divided by 2^8.
  const uint32_t spread = ((pair & 0xff00u) << 16) | ((pair & 0xffu) << 8);
  const uint32_t bits = (spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u);
  asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(bits), "r"(0x5c005c00u));
#endif
  return out;
}
__device__ __forceinline__ uint32_t WidenE4M3High(uint32_t word) {
  uint32_t out;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 t, u; mov.b32 {t, u}, %1; cvt.rn.f16x2.e4m3x2 %0, u; }" : "=r"(out) : "r"(word));
#else
  out = WidenE4M3(word >> 16);
#endif
  return out;
}

// Registers of a thread from here on, more or fewer than before: 24 to 240, a multiple of 8, and for all threads of the
// thread block together as many as it began with, at most. All warps of a warpgroup call it.
template <int kCount, bool kMore>
__device__ __forceinline__ void TakeRegisters() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
#endif
}

}  // namespace dovetail::kernels::cuda
