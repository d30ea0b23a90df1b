#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/device.h"

namespace dovetail::cli {

// Of a GPU with weights: what a compute worker's buffers, cuBLASLt and CUDA itself take next to them. [bytes]
inline constexpr uint64_t kBesideWeights = uint64_t{2} << 30;

// [bytes] What a KV cache may take now of a GPU's memory: what is free, and what this process keeps there for its next
// buffers. A step's tables lie there, too, and whatever CUDA takes later.
// Errors: the GPU's.
// Threads: thread-safe.
absl::StatusOr<uint64_t> KvRoomOn(const kernels::cuda::CudaDevice& gpu);

// How much memory an attention worker takes for KV, as flags say it.
// Threads: thread-compatible; a value.
struct KvCapacityFlags {
  std::string capacity = "auto";
  std::string leave = "0";  // with auto: for others on the device
  std::string most = "0";   // with auto: 0: no bound
  int sharers = 1;          // with auto: workers that share what is free
};

// Without looking at a device. Errors: kInvalidArgument names the flag.
// Threads: pure.
absl::Status CheckKvCapacity(const KvCapacityFlags& flags);

// [bytes] --kv-capacity, or what auto comes to: of KvRoomOn() of a GPU; on a CPU of a quarter of the machine's memory,
// or of what `numa_node` has. Errors: kInvalidArgument, kResourceExhausted: the message names the flag. Threads:
// thread-safe.
absl::StatusOr<uint64_t> KvBytesOf(const KvCapacityFlags& flags, kernels::Device& device,
                                   std::optional<int> numa_node = std::nullopt);

// A worker that starts where another one had `bytes` of a GPU: it takes as much, or what is free, if that is less. What
// the first one left for weights lies in them by then.
// Threads: pure.
KvCapacityFlags TakenBefore(KvCapacityFlags flags, uint64_t bytes);

}  // namespace dovetail::cli
