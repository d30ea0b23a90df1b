#include "engine/device_choice.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/log.h"
#include "kernels/cpu/isa.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/thread_pool.h"

namespace dovetail::engine {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaLibrary;

namespace {

constexpr const char* kFlag = "--device";
// What a GPU needs in addition to the weights: some KV, a step's activations, cuBLASLt and CUDA itself.
constexpr uint64_t kRoomBesideWeights = uint64_t{1} << 30;

absl::StatusOr<kernels::Isa> MaxIsa() {
  const char* const name = std::getenv(kMaxCpuIsa);
  if (name == nullptr || *name == '\0') return kernels::kStrongestIsa;
  if (const auto isa = kernels::IsaCalled(name)) return *isa;
  return InvalidArgument(kMaxCpuIsa, ": '", name, "' is none of avx2, avx512 and amx");
}

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenCpu(int threads, int spin_us = kSpinUs) {
  kernels::CpuDeviceOptions options;
  DT_ASSIGN_OR_RETURN(options.max_isa, MaxIsa());
  options.threads = threads;
  options.spin_us = spin_us;
  auto device = kernels::CreateCpuDevice(options);
  if (!device.ok()) return Annotate(device.status(), "--threads");
  return device;
}

int HostThreads(int threads) {
  return threads > 0 ? threads : std::clamp(kernels::UsableCores(), 1, kernels::ThreadPool::kMaxThreads);
}

absl::Status CheckModel(const DeviceRequest& request, const model::ModelConfig& config) {
  if (request.f32_weights) return Unimplemented("--dtype float32: GPUs compute in bfloat16 or float16");
  return compute::CudaModel::Supports(config, request.kv);
}

// A product finds out whether cuBLASLt is there.
absl::Status CheckLibraries(CudaDevice& device) {
  return kernels::cuda::CudaGemm::Create(device, /*workspace_bytes=*/1 << 20).status();
}

// Whether a driver would have something to drive: a PCI device of NVIDIA.
bool HasNvidiaHardware() {
  std::error_code error;
  for (std::filesystem::directory_iterator at("/sys/bus/pci/devices", error), end; !error && at != end;
       at.increment(error)) {
    std::string vendor;
    if (std::ifstream(at->path() / "vendor") >> vendor && vendor == "0x10de") return true;
  }
  return false;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenAny(const DeviceRequest& request, const model::ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> library, CudaLibrary::Open());
  const kernels::cuda::CudaSurvey survey = kernels::cuda::SurveyCuda(*library);
  const bool nothing_here = survey.status.ok() ? survey.devices.empty() : !HasNvidiaHardware();
  if (nothing_here) return NotFound("this machine has no NVIDIA GPU");
  DT_RETURN_IF_ERROR(survey.status);
  DT_RETURN_IF_ERROR(CheckModel(request, config));
  absl::Status first;
  const uint64_t weights = request.weight_bytes > 0 ? request.weight_bytes : compute::CudaModel::WeightBytes(config);
  const uint64_t needed = weights + kRoomBesideWeights;
  for (const kernels::cuda::CudaDeviceSummary& gpu : survey.devices) {
    absl::Status usable = gpu.usable;
    if (usable.ok() && gpu.free_bytes < needed) {
      usable = ResourceExhausted("the model needs ", needed >> 20, " MiB, and ", gpu.free_bytes >> 20, " MiB are free");
    }
    if (usable.ok()) {
      auto device = CudaDevice::Create(library, {gpu.index, HostThreads(request.threads)});
      if (device.ok()) usable = CheckLibraries(**device);
      if (device.ok() && usable.ok()) return device;
      if (!device.ok()) usable = device.status();
    }
    if (first.ok()) first = Annotate(usable, absl::StrCat("cuda:", gpu.index));
  }
  return first;
}

}  // namespace

absl::Status CheckDeviceName(const std::string& flag, const std::string& name) {
  if (name == "cpu" || name == "auto" || name == kAnyGpu || kernels::cuda::ParseCudaName(name).ok())
    return absl::OkStatus();
  return InvalidArgument(flag, ": '", name,
                         "' is none of auto, cpu, cuda and cuda:N; `dovetail devices` lists what is here");
}

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu(const std::string& flag, const std::string& name, int threads) {
  DT_ASSIGN_OR_RETURN(const int index, kernels::cuda::ParseCudaName(name));
  auto library = CudaLibrary::Open();
  if (!library.ok()) return Annotate(library.status(), absl::StrCat(flag, " ", name));
  auto device = CudaDevice::Create(*std::move(library), {index, HostThreads(threads)});
  if (!device.ok()) return Annotate(device.status(), absl::StrCat(flag, " ", name));
  return device;
}

absl::Status CheckWorkerDeviceName(const std::string& flag, const std::string& name) {
  if (name == "cpu" || kernels::cuda::ParseCudaName(name).ok()) return absl::OkStatus();
  return InvalidArgument(flag, ": '", name, "' is neither cpu nor cuda:N; `dovetail devices` lists what is here");
}

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(const std::string& flag, const std::string& name,
                                                            int threads, int spin_us) {
  DT_RETURN_IF_ERROR(CheckWorkerDeviceName(flag, name));
  if (name == "cpu") return OpenCpu(threads, spin_us);
  return OpenGpu(flag, name, threads);
}

absl::StatusOr<std::unique_ptr<kernels::Device>> ChooseDevice(const DeviceRequest& request,
                                                              const model::ModelConfig& config) {
  DT_RETURN_IF_ERROR(CheckDeviceName(kFlag, request.name));
  if (request.name == "cpu") return OpenCpu(request.threads);
  if (request.name != "auto" && request.name != kAnyGpu) {
    const std::string what = absl::StrCat(kFlag, " ", request.name);
    DT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, OpenGpu(kFlag, request.name, request.threads));
    if (const absl::Status status = CheckModel(request, config); !status.ok()) return Annotate(status, what);
    if (const absl::Status status = CheckLibraries(*device); !status.ok()) return Annotate(status, what);
    return device;
  }
  auto device = OpenAny(request, config);
  if (device.ok()) {
    LogInfo("computing on ", (*device)->name(), ", ", (*device)->info().name);
    return device;
  }
  if (request.name == kAnyGpu) return Annotate(device.status(), absl::StrCat(kFlag, " ", kAnyGpu));
  // A build without the CUDA library, or a machine without a GPU, has nothing to explain.
  if (!absl::IsNotFound(device.status())) LogInfo("computing on the CPU: ", std::string(device.status().message()));
  return OpenCpu(request.threads);
}

CudaDevice* AsGpu(kernels::Device& device) { return dynamic_cast<CudaDevice*>(&device); }

}  // namespace dovetail::engine
