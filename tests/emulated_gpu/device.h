#pragma once
// CUDA device code as plain C++: included before every translated .cu file (-include). A thread of a thread block is a
// fiber (thread_block.h); the real CUDA headers give types and conversions, this one the words that nvcc knows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/emulated_gpu/thread_block.h"

#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __noinline__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900  // without the features of 90a: mma.sync instead of wgmma

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emu {

template <typename... T>
void Load(const void* from, T&... to) {
  const char* bytes = static_cast<const char*>(from);
  ((std::memcpy(&to, bytes, sizeof(T)), bytes += sizeof(T)), ...);
}
template <typename... T>
void Store(void* to, const T&... from) {
  char* bytes = static_cast<char*>(to);
  ((std::memcpy(bytes, &from, sizeof(T)), bytes += sizeof(T)), ...);
}
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Multiply(float a, float b, float) { return a * b; }
inline float Subtract(float a, float b, float) { return a - b; }
template <typename T>
uint32_t ByHalves(uint32_t a, uint32_t b, uint32_t c, float (*op)(float, float, float)) {
  T x[2], y[2], z[2];
  std::memcpy(x, &a, 4), std::memcpy(y, &b, 4), std::memcpy(z, &c, 4);
  for (int i = 0; i < 2; ++i) x[i] = T(op(float(x[i]), float(y[i]), float(z[i])));
  std::memcpy(&a, x, 4);
  return a;
}
inline uint32_t WidenE4M3(uint32_t pair) {  // the low 16 bits
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return wide.x | uint32_t{wide.y} << 16;
}
inline float Exp2(float x) {
  const float y = exp2f(std::fabs(x) < 1.17549435e-38f ? 0 : x);
  return y < 1.17549435e-38f ? 0 : y;  // ftz
}
inline uint32_t ToTF32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x1000u) & ~0x1fffu;
}
inline void LoadMatrices(uint32_t address, bool turned, Site at, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  current->in[0] = address;
  Meet(turned ? kMatricesTransposed : kMatrices, ~0u, at);
  a = current->out[0], b = current->out[1], c = current->out[2], d = current->out[3];
}
inline void Mma(Op op, Site at, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                uint32_t a3, uint32_t b0, uint32_t b1) {
  const float d[4] = {d0, d1, d2, d3};
  const uint32_t ab[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(current->in, d, sizeof(d));
  std::memcpy(current->in + 4, ab, sizeof(ab));
  Meet(op, ~0u, at);
  Load(current->out, d0, d1, d2, d3);
}

}  // namespace emu

#define cudaLaunchKernelEx emu::LaunchKernelEx
#define cudaFuncGetAttributes emu::GetAttributes

#define EMU_SITE emu::Site at = emu::Site::current()
template <typename T>
T __shfl_sync(uint32_t mask, T x, int from, int width = 32, EMU_SITE) {
  return emu::Shuffle(mask, x, (emu::current->lane & -width) | (from & (width - 1)), at);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T x, int bits, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane, from = lane ^ bits;
  return emu::Shuffle(mask, x, from / width > lane / width ? lane : from, at);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T x, int step, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane;
  return emu::Shuffle(mask, x, lane % width + step < width ? lane + step : lane, at);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T x, int step, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane;
  return emu::Shuffle(mask, x, lane % width >= step ? lane - step : lane, at);
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x, EMU_SITE) {
  for (int bits = 16; bits > 0; bits /= 2) x = std::max(x, __shfl_xor_sync(mask, x, bits, 32, at));
  return x;
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t x, EMU_SITE) {
  for (int bits = 16; bits > 0; bits /= 2) x = std::min(x, __shfl_xor_sync(mask, x, bits, 32, at));
  return x;
}
inline void __syncwarp(uint32_t mask = ~0u, EMU_SITE) { emu::Meet(emu::kSync, mask, at); }
inline int __all_sync(uint32_t mask, int x, EMU_SITE) { return emu::Vote(emu::kAll, mask, x, at); }
inline int __any_sync(uint32_t mask, int x, EMU_SITE) { return emu::Vote(emu::kAny, mask, x, at); }
inline uint32_t __ballot_sync(uint32_t mask, int x, EMU_SITE) { return emu::Vote(emu::kBallot, mask, x, at); }
inline void __syncthreads(EMU_SITE) { emu::Bar(0, 0, true, 1, at); }
inline int __syncthreads_and(int x, EMU_SITE) { return emu::Bar(0, 0, true, x != 0, at); }
inline int __syncthreads_or(int x, EMU_SITE) { return !emu::Bar(0, 0, true, x == 0, at); }
inline size_t __cvta_generic_to_shared(const void* p) { return emu::AddressOf(p); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  return std::exchange(*at, *at + x);
}
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> old, std::type_identity_t<T> x) {
  return *at == old ? std::exchange(*at, x) : *at;
}
using std::isinf;
using std::isnan;
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline float __expf(float x) { return emu::Exp2(x * 1.4426950408889634f); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __ffs(int x) { return __builtin_ffs(x); }

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute what, int value) {
  if (what != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return static_cast<cudaError_t>(emu::SetSharedLimit(reinterpret_cast<const void*>(kernel), value));
}
