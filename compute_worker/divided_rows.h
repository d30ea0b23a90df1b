#pragma once
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// What crosses between GPUs in a step whose sequences are divided among attention workers, or whose model has linear
// states (ADR 77, ADR 79), by layer group: which bytes
// of the step's tensors go to which worker's payload, and which bytes of its answer come back where. Payloads and
// answers are laid out as exchange/divided_payloads.h says. DivideRows keeps the capacity.
// Threads: thread-compatible.
struct DividedRows {
  // Rows of the step, row-major over heads: q, k, v, the gates of linear states, and o of all heads.
  enum class Tensor : uint8_t { kQuery, kKey, kValue, kGates, kOutput };
  struct Copy {
    int part = 0;  // index among ComputeWorkerCore::PartsOf
    Tensor tensor = Tensor::kQuery;
    int64_t tensor_at = 0, tensor_step = 0;    // bytes to the first row, and from row to row
    int64_t payload_at = 0, payload_step = 0;  // of kQuery, of kKeyValue, or of the answer
    int64_t rows = 0, row_bytes = 0;
  };
  // What a token shard gives for rows of a join: o and its m and l, f32.
  struct Partial {
    int part = 0;
    int64_t o_at = 0, ml_at = 0;  // bytes into the answer
    int first_row = 0, rows = 0;  // of the join's
    Position begin = 0;           // of its tokens
  };
  // Rows of a sequence and heads whose tokens are divided: to be joined from their partials.
  struct Join {
    int64_t o_at = 0;  // bytes to o of the first row and head, of all heads
    int first_head = 0, heads = 0, rows = 0;
    std::vector<Partial> partials;  // in the order of tokens
  };
  struct Group {
    std::vector<int> parts;     // that have rows in it, ascending
    std::vector<Copy> leaving;  // q, k, v and gates
    std::vector<Copy> arriving;
    std::vector<Join> joins;
    int64_t joined_rows_and_heads = 0;  // the most of a join
  };
  std::vector<Group> groups;
  std::vector<int64_t> query_bytes, key_value_bytes, answer_bytes;  // by part, the most of its layer groups
};

// kFailedPrecondition: why the step cannot cross between GPUs, in one line; `divided` is then unspecified.
// Threads: pure, except for `divided`.
absl::Status DivideRows(const ComputeWorkerCore& core, MicroBatchId id, DividedRows& divided);

}  // namespace dovetail::compute
