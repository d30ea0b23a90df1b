#pragma once
#include <vector>

#include "base/status.h"
#include "kernels/device.h"
#include "plan/device_profile.h"

// Rates of a CPU's kernels, as plan::DeviceProfile has them. Each function blocks for some seconds, runs on the
// stream's pool and keeps the best of several runs. `seconds` is how long each of its points is measured.
// Errors: kResourceExhausted without the memory (about 250 MiB), and those of the kernels.
// Threads: thread-compatible.

namespace dovetail::engine {

// Of one thread, and then of twice as many each time up to those of the device that is measured.
absl::StatusOr<std::vector<plan::ReadRate>> MeasureReads(int threads);

// Bytes that the device's threads together read much faster than memory, time after time: a power of two, or 0.
// `memory_rate`: as MeasureReads has it of all of them.
absl::StatusOr<double> MeasureCacheBytes(kernels::ThreadPool& pool, double memory_rate);

// All formats of weights, 1 to 512 rows, from memory, and few rows from caches of `cache_bytes`.
absl::StatusOr<std::vector<plan::ProductRates>> MeasureProducts(kernels::Stream& stream, double seconds,
                                                                double cache_bytes);

// Heads of 32 to 256, alone and in groups of 4 and 8, in all types of K and V.
absl::StatusOr<std::vector<plan::AttentionRates>> MeasureAttention(kernels::Stream& stream, double seconds);

// States of 32 x 32 to 128 x 128, with and without the delta rule and a decay for each channel.
absl::StatusOr<std::vector<plan::StateRates>> MeasureStates(kernels::Stream& stream, double seconds);

}  // namespace dovetail::engine
