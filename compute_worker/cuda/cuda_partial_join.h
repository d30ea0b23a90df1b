#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/cuda/runtime/staged_upload.h"

namespace dovetail::compute {

// Attention over prompts whose earlier tokens attention workers or other ranks of a ring have: what those answered and
// what was attended here, joined on the GPU. Of one layer group of a micro-batch's step. Partial results lie in memory
// of the caller: subtrees' o, then their m and l, for each prompt and head range those of the answers, then one for
// each row over the tokens of each earlier rank of a ring, then one for each row of our own.
// Ownership: must not outlive the device.
// Threads: thread-compatible.
class CudaPartialJoin {
 public:
  explicit CudaPartialJoin(kernels::cuda::CudaDevice& device) : order_(device) {}

  // For the step that `core` runs in this micro-batch; `locals` of the group, `row_begin` by entry. Uploads which
  // subtrees make up each row. kResourceExhausted: no memory.
  absl::Status Plan(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                    std::span<const StepWire::LocalPartial> locals, std::span<const int64_t> row_begin,
                    kernels::cuda::CudaStream& stream);

  bool empty() const { return joins_.empty(); }
  size_t bytes() const { return (ml_at_ + ml_floats_) * sizeof(float); }  // of the partial results
  int64_t ml_at() const { return ml_at_; }                                // floats to the first m and l
  // The first of our own subtrees of local `index`, as CudaAttentionItem::first_node takes it. Not of those that are
  // whole.
  int64_t first_node(size_t index) const { return first_node_[index]; }

  // Copies what was answered into `partials`, and writes the joined rows to o, [rows, query_heads * value_dim] of the
  // step. `sinks`: of the op, on the device, or null.
  absl::Status Run(const std::vector<WorkerPart>& parts, const proto::SoftmaxSpec& spec, LayerGroup group,
                   float* partials, std::byte* o, const float* sinks, kernels::cuda::CudaStream& stream) const;

 private:
  struct Answer {
    int part = 0, item = 0;  // of its layout
    int64_t node = 0;        // its first, among the join's own
  };
  struct RankShard {  // of an earlier rank of a ring
    int64_t node = 0;
    Position ctx_len = 0;  // of the step's rows
    Position end = 0;      // of that rank's tokens
  };
  // One prompt and head range.
  struct Joined {
    proto::HeadRange kv_heads;
    int64_t row = 0;  // of the step
    int rows = 0, query_heads = 0;
    int64_t o_at = 0;                // floats to its first subtree: a multiple of a subtree's
    std::vector<Answer> answers;     // in token order
    std::vector<RankShard> shards;   // likewise, behind those
    const int32_t* first = nullptr;  // on the device
    const int32_t* order = nullptr;
  };

  void FindAnswers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                   const StepWire::LocalPartial& local, Joined& joined, int64_t& nodes) const;
  static void AppendOrder(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, const Joined& joined,
                          int64_t own_node, std::vector<int32_t>& numbers);

  kernels::cuda::StagedUpload order_;
  std::vector<Joined> joins_;
  std::vector<int64_t> first_node_;  // by local
  int64_t ml_at_ = 0, ml_floats_ = 0;
};

}  // namespace dovetail::compute
