#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/embedded_cluster.h"
#include "server/cli/engine_flags.h"

namespace dovetail::cli {

// Where attention workers are.
struct AttentionPlace {
  std::string device;                // cpu, or cuda:N
  std::optional<uint64_t> kv_bytes;  // of each worker there; none: as the flags of the KV cache say
};

// The value of a flag, as cuda:0=8GiB,cpu=64GiB.
// Errors:  kInvalidArgument names the flag and the part that cannot be read.
// Threads: pure.
absl::StatusOr<std::vector<AttentionPlace>> ParseAttentionPlaces(const std::string& flag, const std::string& value);

// Whether --attention-device is a list, or gives a size; or is `same` on several GPUs (--compute-devices), which then
// have an attention worker each.
bool HasAttentionPlaces(const EngineFlags& flags, int compute_workers);

// Opens the places that --attention-device says, where layers run on engine.device and engine.more_compute_devices:
// the host's is engine.attention_device then. Measures what all memories are read at where the host's is among them,
// for which 2 GiB of that are needed. Errors:  kInvalidArgument names the flag that does not go with it, and what
// would; those of opening a device and of measuring. Ownership: `engine` owns the devices of the places. Threads: the
// devices must be idle. It blocks for up to two seconds.
absl::StatusOr<std::vector<engine::EmbeddedClusterOptions::AttentionPlace>> OpenAttentionPlaces(
    const EngineFlags& flags, int compute_workers, RunningEngine& engine);

}  // namespace dovetail::cli
