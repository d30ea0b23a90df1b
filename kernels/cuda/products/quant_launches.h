#pragma once
#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// A product, or a range of its columns.
struct QuantPart : QuantGemmLaunch {
  int32_t first_step = 0, steps = 0;
};

struct QuantDevice {
  int multiprocessors, shared_bytes;
};

// Each enqueues and returns a cudaError_t, or kQuantTooWide. Arguments are checked by the callers (quant_ops.h).
// Threads: any host thread, one at a time per stream.
int GetQuantDevice(QuantDevice* device);  // the current one; enqueues nothing
int LaunchQuantGemm(const QuantGemmLaunch* launch, void* stream);
int LaunchQuantGemmBF16(const QuantPart& part, const QuantDevice& device, void* stream);
int LaunchQuantGemmF16(const QuantPart& part, const QuantDevice& device, void* stream);
int LaunchQuantUnpack(const QuantUnpackLaunch* launch, void* stream);
int LaunchQuantEmbed(const QuantEmbedLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
