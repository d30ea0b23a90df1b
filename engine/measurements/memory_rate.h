#pragma once
#include <cstddef>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/thread_pool.h"

namespace dovetail::engine {

inline constexpr size_t kReadRateBytes = size_t{256} << 20;
// More than the caches of servers with many cores: what KV caches in host memory are read at.
inline constexpr size_t kHostReadRateBytes = size_t{2} << 30;
inline constexpr size_t kGpuReadRateBytes = size_t{256} << 20;  // several times the cache of an H200

// Bytes per second at which all threads of the pool together read memory, best of five passes over `bytes`, a multiple
// of 1 MiB: what bounds the decoding of one sequence, which reads every weight once per token. Blocks for about 0.2 s
// per 256 MiB. kResourceExhausted without the memory.
// Threads: thread-safe; runs on the caller and the pool, which must be idle.
absl::StatusOr<double> MeasureReadRate(kernels::ThreadPool& pool, size_t bytes = kReadRateBytes);

// Bytes per second at which a plain kernel reads a GPU's memory, best of eight passes over `bytes`, which should be
// more than its caches hold. Blocks for a few milliseconds. kResourceExhausted without the memory. Threads:
// thread-safe.
absl::StatusOr<double> MeasureGpuReadRate(kernels::cuda::CudaDevice& gpu, size_t bytes = size_t{1} << 30);

}  // namespace dovetail::engine
