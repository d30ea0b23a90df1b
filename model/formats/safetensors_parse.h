#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

// The bytes of one safetensors file as checked views. Format and its known attacks: huggingface/safetensors, README.md
// and attacks/.
// Threads: pure.

namespace dovetail::model {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;           // "F32", "BF16", ... as in the file; one of the format's
  std::vector<int64_t> shape;  // outermost first; empty for a scalar; zero sizes are legal
  int64_t elements = 0;
  std::span<const std::byte> bytes;  // row-major, little-endian, aligned to nothing
  int shard = 0;                     // index into SafetensorsFile's shards
};

// Limits of this reader, stricter than the format's.
inline constexpr uint64_t kSafetensorsMaxHeaderBytes = uint64_t{16} << 20;
inline constexpr uint64_t kSafetensorsMaxTensors = 65536;
inline constexpr size_t kSafetensorsMaxDims = 8;

// Reads `bytes`, called `name` in error texts: the tensors in the order of their offsets. They tile the data exactly:
// no hole, no overlap, nothing behind the last. The result's spans view `bytes`.
// Errors: kDataLoss when the file ends too early, kInvalidArgument otherwise.
absl::StatusOr<std::vector<SafetensorsTensor>> ParseSafetensors(const std::string& name,
                                                                std::span<const std::byte> bytes);

}  // namespace dovetail::model
