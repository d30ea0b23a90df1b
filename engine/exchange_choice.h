#pragma once
#include <string>

#include "base/status.h"
#include "exchange/cuda/gpu_exchange.h"
#include "kernels/device.h"

namespace dovetail::engine {

// How this process exchanges layers with workers whose GPU is another. Where that goes through the hosts, there are no
// links, and `why_not` says why.
// `how`: auto, device or host. `role`: "the compute worker" or "the attention worker", for those reasons.
// kFailedPrecondition: "device" was asked for, and why that cannot be. "auto" logs one line instead, on a GPU.
// Threads: one thread at a time; the GPU becomes the calling thread's current one.
absl::StatusOr<exchange::GpuExchangeMeans> ChooseExchange(const std::string& how, const std::string& role,
                                                          kernels::Device& device);

}  // namespace dovetail::engine
