#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "compute_worker/cuda/cuda_model.h"
#include "kernels/device.h"
#include "model/loaded_model.h"

namespace dovetail::engine {

inline constexpr const char* kAnyGpu = "cuda";

// --device: "cpu", "cuda:N", "cuda" or "auto".
absl::Status CheckDeviceName(const std::string& flag, const std::string& name);
// "cpu" or "cuda:N".
absl::Status CheckWorkerDeviceName(const std::string& flag, const std::string& name);

// The GPU called "cuda:N". Errors name the flag and say what is missing. `threads`: of the host's side; 0: one per
// core.
// Threads: thread-safe; opening a device takes up to seconds.
absl::StatusOr<std::unique_ptr<kernels::cuda::CudaDevice>> OpenGpu(const std::string& flag, const std::string& name,
                                                                   int threads);

// For how long idle threads watch for work before they sleep: on cores that layers and attention share, and of workers
// that wait for a GPU's part of each layer, or for the CPU's part, where the cores have nothing else to do.
inline constexpr int kSpinUs = kernels::CpuDeviceOptions().spin_us;
inline constexpr int kSpinBesideGpuUs = 1000;

// In the environment: avx2, avx512 or amx, the strongest instructions that a CPU of this process computes with. CPUs
// give the same bits where they compute with the same ones.
inline constexpr const char* kMaxCpuIsa = "DOVETAIL_MAX_CPU_ISA";

// "cpu" or "cuda:N"; errors name the flag. `spin_us`: of a CPU's threads.
// Threads: thread-safe; opening a device takes up to seconds.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(const std::string& flag, const std::string& name,
                                                            int threads, int spin_us = kSpinUs);

// Threads: thread-compatible; a value.
struct DeviceRequest {
  std::string name = "auto";
  int threads = 0;
  bool f32_weights = false;  // --dtype float32
  DType kv = DType::kBF16;
  uint64_t weight_bytes = 0;  // on a GPU; 0: all of them in 16 bits
};

// Where the model's dense layers run. "auto": the first GPU that can run the model and has room for it, else the CPU,
// with one line of log that says why; "cuda": such a GPU, or an error. An error says why a device that was asked for
// cannot run it.
// Threads: thread-safe; opening a device takes up to seconds.
absl::StatusOr<std::unique_ptr<kernels::Device>> ChooseDevice(const DeviceRequest& request,
                                                              const model::ModelConfig& config);

// The device as a GPU, or null.
kernels::cuda::CudaDevice* AsGpu(kernels::Device& device);

}  // namespace dovetail::engine
