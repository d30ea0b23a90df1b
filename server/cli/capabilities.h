#pragma once
#include "base/status.h"
#include "control/messages.h"
#include "kernels/device.h"

namespace dovetail::cli {

// What a worker on the device tells the scheduler of it: `threads` of a CPU, 0 for as many as there are cores, and how
// fast its memory is read. Blocks for some 20 ms.
// Errors:  kResourceExhausted where a GPU has no memory left to measure.
// Threads: thread-safe.
absl::StatusOr<control::Capabilities> MeasureCapabilities(kernels::Device& device, int threads);

}  // namespace dovetail::cli
