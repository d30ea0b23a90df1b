#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::cli {

// Where `dovetail up` has attention workers.
struct AttentionPlace {
  std::string device;                // cpu, or cuda:N
  std::optional<uint64_t> kv_bytes;  // of each worker there; none: as the flags of the KV cache say
};

// The value of --attention-devices, as cuda:0=8GiB,cpu=64GiB.
// Errors:  kInvalidArgument names the flag and the part that cannot be read.
// Threads: pure.
absl::StatusOr<std::vector<AttentionPlace>> ParseAttentionPlaces(const std::string& value);

}  // namespace dovetail::cli
