#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "model/checkpoint.h"

namespace dovetail::engine {

// Names what a KV block holds besides its tokens, and what a response was made by: every weight's name, shape, type and
// first and last bytes, what the configuration says of positions and rotation, and the type of K and V. Two checkpoints
// that differ in it never share a block. Reads at most two pages of each weight, so that it costs milliseconds.
// Threads: thread-safe.
uint64_t ModelDigest(const model::Checkpoint& checkpoint, DType kv_dtype, DType state_dtype = DType::kF32);

}  // namespace dovetail::engine
