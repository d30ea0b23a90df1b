#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/cuda/cuda_prompt_attention.h"
#include "compute_worker/cuda/cuda_prompt_states.h"
#include "compute_worker/cuda/cuda_rank_rows.h"
#include "compute_worker/cuda/host_stores.h"
#include "compute_worker/cuda/prompt_step_times.h"
#include "compute_worker/step_wire.h"

namespace dovetail::compute {

// ThroughHosts: q, k and v come to pinned memory, where StepWire packs them for any placement, and what comes back is
// joined there. Ready says when they are there.
//
// In a step of decodes, kernels store them there themselves, and fetch what comes back (HostStores); the host waits for
// no step but its own micro-batch's. In a step with prompts that are attended here they are copied by the copy engine,
// in a stream of its own, while the layers go on. What attention workers give for a prompt's rows is joined on the GPU.
// The states that linear layers of such prompts leave are copied in the same stream. In other steps a linear op, and
// one of a step that has more rows than HostStores takes, waits for its copies. Where attention workers attend a step's
// prompts, marks in its stream say how long its layers took.
// Errors: kResourceExhausted: no memory for payloads; kFailedPrecondition: rows for other ranks without a prompt
// scratch; kInternal: the device is lost, or payloads did not arrive.
// Threads: reactor-owned, as CudaDense.
class CudaHostCrossing final : public CudaCrossing {
 public:
  // All outlive it; `prompts`, `states` and `rank_rows` may be null.
  static absl::StatusOr<std::unique_ptr<CudaHostCrossing>> Create(const proto::AttentionTable& table,
                                                                  kernels::cuda::CudaDevice& device, CudaLane& lane,
                                                                  int micro_batches, CudaPromptAttention* prompts,
                                                                  CudaPromptStates* states, CudaRankRows* rank_rows);
  ~CudaHostCrossing() override;

  absl::Status Use(const exchange::Seam& seam, CudaBatch& batch) override;
  absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch) override;
  absl::Status BeforeHeads(CudaBatch& batch) override;
  void LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) override;
  absl::Status Leave(int op, CudaBatch& batch) override;
  absl::Status AttendPrompts(const ComputeWorkerCore& core, int op, CudaBatch& batch) override;
  absl::Status AttendShard(const ComputeWorkerCore& core, const compute::AttendShard& shard, CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> RankRows(int op, int64_t first_row, CudaBatch& batch) override;
  absl::StatusOr<bool> RankRowsReady(int op, const CudaBatch& batch) const override;
  absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore& core, int op, const proto::HeadRange& heads,
                                                 CudaBatch& batch) override;
  absl::Status AttendHeads(const ComputeWorkerCore& core, const compute::AttendHeads& attend,
                           CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> TakeRankOutputs(CudaBatch& batch) override;
  absl::Status PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place, CudaBatch& batch) override;
  absl::StatusOr<bool> Ready(int op, const CudaBatch& batch) const override;
  absl::StatusOr<transport::LentBytes> PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                 CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                    CudaBatch& batch) override;
  absl::StatusOr<const void*> Arrive(int op, const std::vector<WorkerPart>& parts, const void* arriving,
                                     CudaBatch& batch) override;
  absl::Status BeforeDraws(CudaBatch& batch) override;
  absl::Status Ended(MicroBatchId id, StepId step, const absl::Status& drawn) override;
  std::optional<DenseBackend::GpuTimes> TimesOf(MicroBatchId id) const override;

 private:
  struct Rows {
    int64_t first = 0, count = 0;  // of the step
  };
  struct Step {
    std::unique_ptr<StepWire> wire;
    bool copied = false;            // q, k and v have reached it
    bool under_way = false;         // it was begun, and has not ended well
    kernels::cuda::CudaEvent made;  // q, k and v of the op at hand are there
    // Of steps without prompts.
    bool stores = false;  // kernels store q, k and v
    std::unique_ptr<HostStores> host;
    mutable int looks = 0;  // at what they have stored
    // Of steps with prompts.
    bool streams = false;
    bool attends = false;                                  // in softmax ops, prompts here
    bool in_parts = false;                                 // that one, in a ring or a head switch of ranks
    bool runs_states = false;                              // in linear ops, prompts here
    bool timed = false;                                    // it does not stream, but has a prompt
    std::vector<kernels::cuda::CudaEvent> copied_of_slot;  // their copies are: by op, modulo the ops that are in flight
    std::vector<kernels::cuda::CudaEvent> given_of_slot;   // likewise: what goes to other ranks is
    std::optional<int> last_op;                            // that left
    std::vector<std::vector<Rows>> asked;                  // by layer group: whose q leaves
    std::vector<Rows> elsewhere;                           // that are no prompt's
    std::unique_ptr<PromptStepTimes> times;
  };

  CudaHostCrossing(const proto::AttentionTable& table, kernels::cuda::CudaDevice& device, CudaLane& lane,
                   int micro_batches, CudaPromptAttention* prompts, CudaPromptStates* states, CudaRankRows* rank_rows);
  absl::Status MakeTimes(Step& step);
  absl::Status BeginStreaming(const ComputeWorkerCore& core, CudaBatch& batch, Step& step);
  void FindRows(const ComputeWorkerCore& core, MicroBatchId id, Step& step) const;
  absl::Status JoinTimed(const std::vector<WorkerPart>& parts, int op, CudaBatch& batch, Step& step);
  // Kernels store the op's q, k and v into host memory.
  bool Stores(const Step& step, int op) const { return step.stores && table_.linear(table_.op_group[op]) == nullptr; }
  absl::Status CopyOut(int op, CudaBatch& batch, kernels::cuda::CudaStream& stream);
  absl::Status Await(int op, CudaBatch& batch);
  const kernels::cuda::CudaEvent& CopiedOf(const Step& step, int op) const {
    return step.copied_of_slot[op % step.copied_of_slot.size()];
  }
  const kernels::cuda::CudaEvent& GivenOf(const Step& step, int op) const {
    return step.given_of_slot[op % step.given_of_slot.size()];
  }

  const proto::AttentionTable& table_;
  kernels::cuda::CudaDevice& device_;
  kernels::cuda::PinnedHost pinned_;
  CudaLane& lane_;
  // The op's prompts are attended here, so that their rows of o are made here.
  bool AttendsHere(const Step& step, int op) const {
    return table_.linear(table_.op_group[op]) != nullptr ? step.runs_states : step.attends;
  }

  CudaPromptAttention* const prompts_;
  CudaPromptStates* const states_;
  CudaRankRows* const rank_rows_;
  std::unique_ptr<kernels::cuda::CudaStream> copies_;  // null without prompts
  std::vector<Step> steps_;                            // by micro-batch
};

}  // namespace dovetail::compute
