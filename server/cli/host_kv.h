#pragma once
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "model/config.h"

namespace dovetail::cli {

// What bounds decoding where a GPU computes the layers and the KV cache and linear states lie in host memory.
struct HostKv {
  int threads = 0;              // that read host memory
  double read_bytes_per_s = 0;  // all of them together; > 0
  double gpu_bytes = 0;         // of the GPU's memory that the KV cache could have had
};

// Of one batch.
struct HostKvOfBatch {
  double step_bytes = 0;    // of host memory that a step moves: KV is read, linear states are read and written
  double read_seconds = 0;  // the least time of that, at the read rate
  double share = 0;         // of the read rate that steps reached
  int64_t gpu_batch = 0;    // sequences of this length that the GPU's memory would hold
};

// Units: `tokens` is the mean length of a sequence while it is measured; `step_seconds` > 0 is a step's time, in which
// each of `sequences` gets one token. `kv` is the type that crosses. Host memory has `stored` times its bytes; the
// GPU's memory would have the bytes that cross. Errors: none. Threads: pure.
HostKvOfBatch HostKvOf(const HostKv& memory, const model::ModelConfig& config, DType kv, int64_t tokens, int sequences,
                       double step_seconds, double stored = 1);

// One line for a table, without a newline: "KV 2.15 GB a step: at least 13.0 ms, 18% of the read rate; the GPU's memory
// would hold 1024 such sequences".
// Threads: pure.
std::string TextOf(const HostKvOfBatch& batch);

}  // namespace dovetail::cli
