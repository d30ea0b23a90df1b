#include "server/cli/capabilities.h"

#include <thread>

#include "control/worker_main.h"
#include "engine/device_choice.h"
#include "engine/measurements/memory_rate.h"

namespace dovetail::cli {
absl::StatusOr<control::Capabilities> MeasureCapabilities(kernels::Device& device, int threads) {
  control::Capabilities capabilities;
  capabilities.cores = threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency());
  capabilities.device = device.name();
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(device); gpu != nullptr) {
    DT_ASSIGN_OR_RETURN(const double rate, engine::MeasureGpuReadRate(*gpu, engine::kGpuReadRateBytes));
    capabilities.memory_bytes_per_s = static_cast<uint64_t>(rate);
  } else {
    capabilities.memory_bytes_per_s = control::MeasureMemoryBandwidth();
  }
  return capabilities;
}

}  // namespace dovetail::cli
