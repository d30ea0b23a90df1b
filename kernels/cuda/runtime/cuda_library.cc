#include "kernels/cuda/runtime/cuda_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

namespace dovetail::kernels::cuda {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFileName = "libdovetail_cuda.so";
constexpr int kOldestDriver = 13000;
constexpr int kOldestMajor = 8;

std::vector<std::string> Candidates(const std::string& path) {
  if (!path.empty()) return {path};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  const fs::path folder = program.parent_path();
  return {folder / kFileName, folder / "lib" / kFileName, folder / "../lib" / kFileName,
          folder / "../../lib" / kFileName};
}

std::string Join(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : ", ") + part;
  return all;
}

std::string Version(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

absl::Status Usable(const CudaLibrary& library, CudaDeviceSummary& device) {
  DT_RETURN_IF_ERROR(library.Check(library->device_info(device.index, &device.info), "looking at the GPU"));
  if (device.info.major < kOldestMajor) {
    return FailedPrecondition("compute capability ", device.info.major, ".", device.info.minor,
                              " is too old; 8.0 (Ampere) or newer is needed");
  }
  bool has_code = false;
  DT_RETURN_IF_ERROR(library.Check(library->has_code(device.index, &has_code), "loading kernels"));
  if (!has_code) {
    return FailedPrecondition("this build has no kernels for compute capability ", device.info.major, ".",
                              device.info.minor, "; build with it in DOVETAIL_CUDA_ARCHITECTURES");
  }
  size_t total = 0;
  return library.Check(library->memory_info(device.index, &device.free_bytes, &total), "asking for free memory");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CudaLibrary>> CudaLibrary::Open(const std::string& path) {
  const std::vector<std::string> candidates = Candidates(path);
  for (const std::string& candidate : candidates) {
    std::error_code error;
    if (!fs::exists(candidate, error)) continue;
    void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return FailedPrecondition("the CUDA library cannot be opened: ", dlerror());
    using Entry = const Backend* (*)();
    const auto entry = reinterpret_cast<Entry>(dlsym(handle, "dovetail_cuda_backend"));
    const Backend* backend = entry != nullptr ? entry() : nullptr;
    if (backend == nullptr || backend->abi != kBackendAbi) {
      dlclose(handle);
      return FailedPrecondition(candidate, " is not of this build of Dovetail; install both from one release");
    }
    return std::shared_ptr<const CudaLibrary>(new CudaLibrary(handle, backend));
  }
  return NotFound("no CUDA library: looked for ", Join(candidates),
                  "; build Dovetail where NVIDIA's nvcc is installed, or install a release that has it");
}

CudaLibrary::~CudaLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

absl::Status CudaLibrary::Check(int error, const std::string& what) const {
  if (error == 0) return absl::OkStatus();
  if (backend_->is_out_of_memory(error)) return ResourceExhausted(what, ": ", backend_->error_text(error));
  return Internal(what, ": ", backend_->error_text(error), " (CUDA error ", error, ")");
}

CudaSurvey SurveyCuda(const CudaLibrary& library) {
  CudaSurvey survey;
  const int error = library->versions(&survey.driver_version, &survey.runtime_version);
  if (error != 0 || survey.driver_version == 0) {
    survey.status = FailedPrecondition("no NVIDIA driver: install one for CUDA ", Version(kOldestDriver), " or newer");
    return survey;
  }
  if (survey.driver_version < kOldestDriver) {
    survey.status = FailedPrecondition("the NVIDIA driver is for CUDA ", Version(survey.driver_version), "; ",
                                       Version(kOldestDriver), " or newer is needed");
    return survey;
  }
  int count = 0;
  survey.status = library.Check(library->device_count(&count), "counting GPUs");
  for (int i = 0; survey.status.ok() && i < count; ++i) {
    CudaDeviceSummary device{.index = i};
    device.usable = Usable(library, device);
    survey.devices.push_back(std::move(device));
  }
  return survey;
}

}  // namespace dovetail::kernels::cuda
