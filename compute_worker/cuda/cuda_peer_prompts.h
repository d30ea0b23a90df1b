#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_prompt_attention.h"
#include "compute_worker/cuda/prompt_step_times.h"
#include "compute_worker/row_spread.h"
#include "exchange/cuda/step_exchange.h"

namespace dovetail::compute {

// Prompts of steps that GPUs exchange themselves, attended on the compute worker's (ADR 65). K and V of all rows, and q
// of those that attention workers attend, are made in this GPU's memory. From there the copy engine takes them to the
// slots of the attention workers' GPUs, in a stream of the micro-batch's own, and a kernel sends their number behind
// them (kernels/cuda/exchange/exchange_args.h). Meanwhile the prompts are attended here. An attention worker answers
// with o of its own rows, or with a number only: its slot may be written again. In a step of prompts only it is the
// copies of the next op that wait for the number, so the layers wait for nothing before the last op's.
//
// Order: Settle for each step between GPUs; for one with prompts Begin, then of each op BeforeHeads, Leave, Attend,
// Arrive; AwaitLast, End, and Ended once it has run. Launches go into the stream of the step's lane as they are asked
// for.
// Errors: what fails ends the step.
// Threads: reactor-owned, as CudaDense.
class CudaPeerPrompts {
 public:
  // All outlive it.
  CudaPeerPrompts(const proto::AttentionTable& table, kernels::cuda::CudaDevice& device, CudaPromptAttention& prompts,
                  int micro_batches)
      : table_(table), device_(device), prompts_(prompts), steps_(micro_batches) {}
  ~CudaPeerPrompts();  // waits for the copies

  // Before anything of a step is enqueued: waits for what a step of the micro-batch that failed has enqueued, since it
  // stores where the new step does.
  absl::Status Settle(const CudaBatch& batch);
  // `peers` by part; `spread` is the step's. May allocate.
  absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch, const std::vector<exchange::GpuExchange*>& peers,
                     const RowSpread& spread);

  absl::Status BeforeHeads(CudaBatch& batch);
  // Behind the kernel that made q, k and v of the op, in batch.query and batch.key_value.
  absl::Status Leave(int op, CudaBatch& batch);
  absl::Status Attend(const ComputeWorkerCore& core, int op, CudaBatch& batch);
  // o of all rows, [rows, query_heads * value_dim] in the wire type, behind the answers that bring some of it.
  absl::StatusOr<const void*> Arrive(int op, CudaBatch& batch);

  absl::Status AwaitLast(CudaBatch& batch);  // all answers, behind the last op
  absl::Status End(CudaBatch& batch);        // behind the last op
  bool Ran(MicroBatchId id) const;           // all of it
  absl::Status Ended(MicroBatchId id);       // waits until it has
  // Once it has ended; see DenseBackend.
  std::optional<DenseBackend::GpuTimes> TimesOf(MicroBatchId id) const;

 private:
  // Of a micro-batch. Made by its first step with prompts.
  struct Step {
    std::unique_ptr<kernels::cuda::CudaStream> copies;
    kernels::cuda::CudaEvent made, copied;  // q, k and v of the op at hand; their copies
    std::unique_ptr<PromptStepTimes> times;
    std::vector<exchange::GpuExchange*> peers;  // by part
    std::vector<RowSpread::Run> runs;
    std::vector<int64_t> part_rows;
    bool asks = false;           // attention workers attend some rows
    std::optional<int> last_op;  // that left
    bool under_way = false;      // it was begun, and has not ended well
  };
  absl::Status Make(Step& step);
  absl::Status Await(int op, MicroBatchId id, kernels::cuda::CudaStream& stream);
  absl::Status Copy(int op, const RowSpread::Run& run, CudaBatch& batch);

  const proto::AttentionTable& table_;
  kernels::cuda::CudaDevice& device_;
  CudaPromptAttention& prompts_;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::compute
