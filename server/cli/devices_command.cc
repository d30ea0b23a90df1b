#include <cstdio>
#include <string>

#include "control/gpu_links.h"
#include "kernels/cpu/isa.h"
#include "kernels/cuda/runtime/cuda_library.h"
#include "kernels/thread_pool.h"
#include "server/cli/commands.h"

namespace dovetail::cli {
namespace {

using kernels::cuda::CudaDeviceSummary;

std::string Gibibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GiB", static_cast<double>(bytes) / (size_t{1} << 30));
  return text;
}

const char* Describe(kernels::Isa isa) {
  switch (isa) {
    case kernels::Isa::kAvx2: return "AVX2";
    case kernels::Isa::kAvx512: return "AVX-512 with VNNI and BF16";
    case kernels::Isa::kAmx: return "AVX-512 with VNNI and BF16, AMX";
  }
  return "";
}

std::string CpuLine() {
  const std::optional<kernels::Isa> isa = kernels::DetectIsa();
  if (!isa) return "cpu      not usable: AVX2, FMA, F16C or BMI2 is missing (an x86-64-v3 processor is needed)\n";
  return absl::StrCat("cpu      ", kernels::UsableCores(), " cores, ", Describe(*isa), "\n");
}

std::string GpuLine(const CudaDeviceSummary& device) {
  std::string line = absl::StrCat("cuda:", device.index, "   ", device.info.name);
  if (device.info.memory_bytes > 0) absl::StrAppend(&line, ", ", Gibibytes(device.info.memory_bytes));
  if (!device.usable.ok()) return absl::StrCat(line, ", not usable: ", device.usable.message(), "\n");
  return absl::StrCat(line, " (", Gibibytes(device.free_bytes), " free), compute capability ", device.info.major, ".",
                      device.info.minor, ", ", device.info.multiprocessors, " multiprocessors, ", device.info.pci,
                      "\n");
}

// Whether the library of NVIDIA's is there that is looked up at run time.
std::string LibraryLine(const kernels::cuda::CudaLibrary& library, int device) {
  char text[2048] = {};
  void* handle = nullptr;
  std::string line = "dense layers: cuBLASLt";
  if (const int error = library->gemm_open(device, size_t{1} << 20, &handle, text, sizeof(text)); error == 0) {
    library->gemm_close(handle);
  } else {
    absl::StrAppend(&line, " cannot be used: ", text[0] != '\0' ? text : library->error_text(error));
  }
  return line + "\n";
}

std::string GpuLines() {
  const auto library = kernels::cuda::CudaLibrary::Open();
  if (!library.ok()) return absl::StrCat("cuda     not usable: ", library.status().message(), "\n");
  const kernels::cuda::CudaSurvey survey = kernels::cuda::SurveyCuda(**library);
  if (!survey.status.ok()) return absl::StrCat("cuda     not usable: ", survey.status.message(), "\n");
  std::string lines;
  for (const CudaDeviceSummary& device : survey.devices) lines += GpuLine(device);
  if (lines.empty()) return "cuda     not usable: this machine has no NVIDIA GPU\n";
  for (const CudaDeviceSummary& device : survey.devices) {
    if (!device.usable.ok()) continue;
    lines += LibraryLine(**library, device.index);
    break;
  }
  const absl::Status links = control::GpuLinksBuilt();
  return absl::StrCat(lines, "exchange of layers between GPUs of two processes: ",
                      links.ok() ? "by themselves where they are linked (UCX's cuda_ipc)" : links.message(), "\n");
}

}  // namespace

absl::Status RunDevices() {
  std::fputs((CpuLine() + GpuLines()).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
