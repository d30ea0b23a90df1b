#pragma once
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// What crosses between GPUs in a step whose sequences are divided among attention workers, by layer group: which bytes
// of the step's tensors go to which worker's payload, and which bytes of its answer come back where. Payloads and
// answers are laid out as proto::StepLayout says. DivideRows keeps the capacity.
// Threads: thread-compatible.
struct DividedRows {
  // Rows of the step, row-major over heads: q, k, v, and o of all heads.
  enum class Tensor : uint8_t { kQuery, kKey, kValue, kOutput };
  struct Copy {
    int part = 0;  // index among ComputeWorkerCore::PartsOf
    Tensor tensor = Tensor::kQuery;
    int64_t tensor_at = 0, tensor_step = 0;    // bytes to the first row, and from row to row
    int64_t payload_at = 0, payload_step = 0;  // of kQuery, of kKeyValue, or of the answer
    int64_t rows = 0, row_bytes = 0;
  };
  struct Group {
    std::vector<int> parts;     // that have rows in it, ascending
    std::vector<Copy> leaving;  // q, k and v
    std::vector<Copy> arriving;
  };
  std::vector<Group> groups;
};

// kFailedPrecondition: why the step cannot cross between GPUs, in one line; `divided` is then unspecified.
// Threads: pure, except for `divided`.
absl::Status DivideRows(const ComputeWorkerCore& core, MicroBatchId id, DividedRows& divided);

}  // namespace dovetail::compute
