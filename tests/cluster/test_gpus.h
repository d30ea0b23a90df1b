#pragma once
#include <dlfcn.h>

#include <filesystem>
#include <memory>
#include <utility>

#include "base/status.h"
#include "compute_worker/cuda/cuda_model.h"

// GPUs for tests of clusters, real ones and emulated ones.

namespace dovetail::test {

struct TestGpu {
  std::unique_ptr<kernels::cuda::CudaDevice> device;
  std::unique_ptr<compute::CudaModel> weights;
};

// With the model's weights in 16 bits. The model outlives it. Fails where there is no such GPU.
inline absl::Status OpenTestGpu(int index, const model::LoadedModel& model, TestGpu& gpu) {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  DT_ASSIGN_OR_RETURN(gpu.device,
                      kernels::cuda::CudaDevice::Create(std::move(library), {.index = index, .host_threads = 2}));
  DT_ASSIGN_OR_RETURN(gpu.weights, compute::CudaModel::Load(*gpu.device, model, DType::kBF16, false,
                                                            compute::GpuWeights::kDequantise, {}));
  return absl::OkStatus();
}

// What an emulated GPU is told (tests/emulated_gpu/runtime.cc), by its number; -1: all of them are well. Null on real
// ones.
using TellGpu = void (*)(int);
inline TellGpu EmulatedGpus(const char* what) {
  const auto library = std::filesystem::canonical("/proc/self/exe").parent_path() / "libdovetail_cuda.so";
  void* const emulated = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  return emulated == nullptr ? nullptr : reinterpret_cast<TellGpu>(dlsym(emulated, what));
}

}  // namespace dovetail::test
