#include <cuda_bf16.h>

#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/state/state_pack_launches.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Packed bytes are aligned to two bytes only.
__device__ __forceinline__ void StoreFloat(std::byte* to, float x) {
  const uint32_t bits = __float_as_uint(x);
  reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(bits);
  reinterpret_cast<uint16_t*>(to)[1] = static_cast<uint16_t>(bits >> 16);
}
__device__ __forceinline__ float LoadFloat(const std::byte* from) {
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  return __uint_as_float(static_cast<uint32_t>(halves[0]) | static_cast<uint32_t>(halves[1]) << 16);
}

// A decay and its logarithm, as StateToCpu and StateFromCpu convert them.
__device__ __forceinline__ float DecayOf(float log) { return log <= kLowestLogDecay ? 0.0f : expf(log); }
__device__ __forceinline__ float LogOf(float decay) {
  return decay > 0 ? fmaxf(logf(decay), kLowestLogDecay) : kLowestLogDecay;
}

__device__ __forceinline__ std::byte* RowAt(const StatePackJob& job, const StateSection& section, int row) {
  return job.block + section.offset + static_cast<int64_t>(row) * section.row_bytes;
}

// `rows` rows from `first` on, `bytes` of each; by the thread block. Returns where they end in `packed`.
template <bool kUnpack, typename T>
__device__ __forceinline__ void MoveElements(const StatePackJob& job, const StateSection& section, int first, int rows,
                                             int bytes, std::byte* packed) {
  const int count = bytes / static_cast<int>(sizeof(T));
  const int width = kUnpack ? section.row_bytes / static_cast<int>(sizeof(T)) : count;
  auto* const wire = reinterpret_cast<T*>(packed);
  for (int i = threadIdx.x; i < rows * width; i += kThreads) {
    const int row = i / width, column = i - row * width;
    T* const at = reinterpret_cast<T*>(RowAt(job, section, first + row)) + column;
    if (!kUnpack) {
      wire[static_cast<int64_t>(row) * count + column] = *at;
    } else {
      *at = column < count ? wire[static_cast<int64_t>(row) * count + column] : T{};
    }
  }
}

template <bool kUnpack>
__device__ __forceinline__ std::byte* MoveRows(const StatePackJob& job, const StateSection& section, int first,
                                               int rows, int bytes, std::byte* packed) {
  const bool wide = (reinterpret_cast<uintptr_t>(packed) | static_cast<uintptr_t>(bytes)) % sizeof(uint4) == 0;
  if (wide) {
    MoveElements<kUnpack, uint4>(job, section, first, rows, bytes, packed);
  } else {
    MoveElements<kUnpack, uint16_t>(job, section, first, rows, bytes, packed);
  }
  return packed + static_cast<int64_t>(rows) * bytes;
}

// Rows of `count` elements of a bf16 section, as f32 on the wire; decays there, logarithms here.
template <bool kUnpack, bool kDecays>
__device__ __forceinline__ std::byte* MoveTokens(const StatePackJob& job, const StateSection& section, int count,
                                                 std::byte* packed) {
  const int width = kUnpack ? section.row_bytes / 2 : count;
  for (int i = threadIdx.x; i < job.tokens * width; i += kThreads) {
    const int row = i / width, column = i - row * width;
    auto* const at = reinterpret_cast<__nv_bfloat16*>(RowAt(job, section, row)) + column;
    std::byte* const wire = packed + 4 * (static_cast<int64_t>(row) * count + column);
    if (!kUnpack) {
      const float x = __bfloat162float(*at);
      StoreFloat(wire, kDecays ? DecayOf(x) : x);
    } else {
      const float x = column < count ? LoadFloat(wire) : 0.0f;
      *at = __float2bfloat16_rn(kDecays ? LogOf(x) : x);
    }
  }
  return packed + 4 * static_cast<int64_t>(job.tokens) * count;
}

template <bool kUnpack>
__device__ __forceinline__ std::byte* MoveScalarDecays(const StatePackJob& job, const StateSection& section,
                                                       std::byte* packed) {
  auto* const logs = reinterpret_cast<float*>(RowAt(job, section, 0));
  for (int i = threadIdx.x; i < job.tokens; i += kThreads) {
    if (!kUnpack) {
      StoreFloat(packed + 4 * i, DecayOf(logs[i]));
    } else {
      logs[i] = LogOf(LoadFloat(packed + 4 * i));
    }
  }
  return packed + 4 * job.tokens;
}

// A thread block a job.
template <bool kUnpack>
__global__ void __launch_bounds__(kThreads) StatePackKernel(const __grid_constant__ StatePackLaunch p) {
  const StatePackJob job = p.jobs[blockIdx.x];
  std::byte* at = p.packed + job.at;
  const int inputs = 2 * p.history_channels;
  if (job.tokens == kStateTokens) {
    at = MoveRows<kUnpack>(job, p.layout.state, 0, p.key_dim, p.value_dim * p.state_bytes, at);
    if (p.history_channels > 0)
      MoveRows<kUnpack>(job, p.layout.history, kStateTokens - p.history_tokens, p.history_tokens, inputs, at);
    return;
  }
  at = MoveTokens<kUnpack, false>(job, p.layout.keys, p.key_dim, at);
  at = MoveTokens<kUnpack, false>(job, p.layout.values, p.value_dim, at);
  at = p.vector_decay ? MoveTokens<kUnpack, true>(job, p.layout.decays, p.key_dim, at)
                      : MoveScalarDecays<kUnpack>(job, p.layout.decays, at);
  if (p.history_channels > 0) MoveRows<kUnpack>(job, p.layout.history, 0, job.tokens, inputs, at);
}

}  // namespace

int LaunchStatePack(const StatePackLaunch* p, void* stream) {
  StatePackKernel<false><<<p->count, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

int LaunchStateUnpack(const StatePackLaunch* p, void* stream) {
  StatePackKernel<true><<<p->count, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
