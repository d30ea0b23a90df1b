#pragma once
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "plan/device_profile.h"

// Rates of a GPU's kernels, as plan::DeviceProfile has them, measured inside of recorded graphs. Each function blocks
// for some seconds and keeps the best of several runs. `seconds` is how long each of its points is measured. Errors:
// kResourceExhausted without the memory (about 2.5 GiB with the sizes below), and those of the kernels. Threads:
// thread-compatible.

namespace dovetail::engine {

// What is measured; smaller ones are for tests.
// Threads: a plain value.
struct GpuSizes {
  int64_t outputs = 8192, inputs = 4096, rows = 8192;  // of a product, the most rows
  int matrices = 4;                                    // in turn: more than the L2 holds
  int sequences = 64;                                  // that decode
  int64_t context = 4096;                              // of each
  int64_t prompt = 8192;
  size_t read_bytes = size_t{1} << 30;
};

// Bytes a second at which a plain kernel reads memory: of one "thread", as ReadRate has it.
absl::StatusOr<std::vector<plan::ReadRate>> MeasureGpuReads(kernels::cuda::CudaDevice& gpu, double seconds,
                                                            const GpuSizes& sizes = {});

// Weights in bf16, from 1 row on by powers of two.
absl::StatusOr<std::vector<plan::ProductRates>> MeasureGpuProducts(kernels::cuda::CudaDevice& gpu, double seconds,
                                                                   const GpuSizes& sizes = {});

// Seconds of one product of that shape, in bf16, after another of the same weights.
absl::StatusOr<double> MeasureGpuProduct(kernels::cuda::CudaDevice& gpu, int64_t rows, int64_t outputs, int64_t inputs,
                                         double seconds);

// Heads of 64, 128 and 256, alone and in groups of 4 and 8, K and V in bf16 and E4M3.
absl::StatusOr<std::vector<plan::AttentionRates>> MeasureGpuAttention(kernels::cuda::CudaDevice& gpu, double seconds,
                                                                      const GpuSizes& sizes = {});

// States of 64 x 64 and 128 x 128, with and without the delta rule and a decay for each channel.
absl::StatusOr<std::vector<plan::StateRates>> MeasureGpuStates(kernels::cuda::CudaDevice& gpu, double seconds,
                                                               const GpuSizes& sizes = {});

}  // namespace dovetail::engine
