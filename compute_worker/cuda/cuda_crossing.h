#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/dense_backend.h"
#include "exchange/seam.h"
#include "kernels/cuda/rows/append_args.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// A way across the seam as CudaDense uses it: where q, k and v of a step go, where o comes from, and how the step's
// launches are collected. One of these for each alternative of exchange::Seam; numbers in brackets are obligations
// there.
//
// Order: Use and Begin for each step; for each op BeforeHeads, LeaveFrom, Leave, AttendPrompts if the step has any that
// are attended here (and AttendShard), Arriving, Arrive; BeforeDraws, Launch. Pack... of an op come behind its Leave,
// in ascending order.
// Errors: what fails ends the step.
// Threads: reactor-owned, as CudaDense.
class CudaCrossing {
 public:
  virtual ~CudaCrossing() = default;

  // A step begins that crosses this way: its lane, and its work if launches are collected [3].
  virtual absl::Status Use(const exchange::Seam& seam, CudaBatch& batch) = 0;
  // batch.rows are known. May allocate.
  virtual absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch) = 0;

  // What kernels have to know of the seam is a part of the step's upload: room for it, then its contents and where it
  // will lie on the device.
  virtual void AddTo(kernels::cuda::UploadLayout&, const CudaBatch&) {}
  virtual void Fill(std::byte* /*host*/, const std::byte* /*device*/, const CudaBatch&) {}
  // What else launches depend on: as StepWork::Add takes it.
  virtual std::array<uint64_t, 3> Words(const CudaBatch&) const { return {}; }

  // Before the kernel that computes q, k and v of an op.
  virtual absl::Status BeforeHeads(CudaBatch&) { return absl::OkStatus(); }
  // Where the kernel that computes q, k and v of a softmax op stores them: `out` says into the batch's tensors.
  virtual void LeaveFrom(int /*op*/, const CudaBatch&, kernels::cuda::KvAppendLaunch& /*out*/) {}
  // Behind it.
  virtual absl::Status Leave(int op, CudaBatch& batch) = 0;
  // Attends the prompts of the step, as far as they are attended here.
  virtual absl::Status AttendPrompts(const ComputeWorkerCore&, int op, CudaBatch&) {
    return Internal("attention op ", op, ": prompts are attended on attention workers");
  }
  // Behind AttendPrompts, in a ring: likewise over K and V of an earlier rank.
  virtual absl::Status AttendShard(const ComputeWorkerCore&, const compute::AttendShard& shard, CudaBatch&) {
    return Internal("attention op ", shard.op, ": K and V go round among GPUs whose ranks exchange through the hosts");
  }
  // Behind Leave, before AttendPrompts: k and v of the step's rows from first_row on, for another rank; there once
  // RankRowsReady.
  virtual absl::StatusOr<transport::LentBytes> RankRows(int op, int64_t /*first_row*/, CudaBatch&) {
    return Internal("attention op ", op, ": the ranks of a prompt exchange through the hosts");
  }
  virtual absl::StatusOr<bool> RankRowsReady(int /*op*/, const CudaBatch&) const { return true; }
  // Behind Leave, in a head switch: what DenseBackend has of these names, of AttendHeads of one rank after the other.
  virtual absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore&, int op, const proto::HeadRange&,
                                                         CudaBatch&) {
    return NoHeads(op);
  }
  virtual absl::Status AttendHeads(const ComputeWorkerCore&, const compute::AttendHeads& attend, CudaBatch&) {
    return NoHeads(attend.op);
  }
  virtual absl::StatusOr<transport::LentBytes> TakeRankOutputs(CudaBatch&) { return NoHeads(-1); }
  virtual absl::Status PlaceOutputs(const ComputeWorkerCore&, const PlaceRankOutputs& place, CudaBatch&) {
    return NoHeads(place.op);
  }
  // The payloads of the op are where they can be packed without waiting. kInternal: the device is lost.
  virtual absl::StatusOr<bool> Ready(int /*op*/, const CudaBatch&) const { return true; }
  // The payloads of part `p` [5].
  virtual absl::StatusOr<transport::LentBytes> PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                         CudaBatch& batch) = 0;
  virtual absl::StatusOr<transport::LentBytes> PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                            CudaBatch& batch) = 0;

  // What launches that read o depend on: where it lies, as far as that differs from step to step.
  virtual const void* Arriving(const std::vector<WorkerPart>&, const CudaBatch&) const { return nullptr; }
  // Before the kernels that read o of the op; returns where it is, [rows, query_heads * value_dim]. `arriving`: what
  // Arriving said [6].
  virtual absl::StatusOr<const void*> Arrive(int op, const std::vector<WorkerPart>& parts, const void* arriving,
                                             CudaBatch& batch) = 0;

  // After the last op: what comes before the draws; in a step whose launches are collected, behind them [8].
  virtual absl::Status BeforeDraws(CudaBatch&) { return absl::OkStatus(); }
  virtual absl::Status Launch(CudaBatch& batch) { return batch.work->Launch(batch.stream()); }

  // Of a step that draws nothing: whether its end is waited for nonetheless, and whether it has come.
  virtual bool WaitsForEnd(MicroBatchId) const { return false; }
  virtual bool Ran(MicroBatchId) const { return true; }
  // Once the step has run: how it ended. `drawn`: what became of its draws, which mean nothing if a peer did not
  // answer. kUnavailable: it did not.
  virtual absl::Status Ended(MicroBatchId, StepId, const absl::Status& drawn) { return drawn; }
  virtual std::optional<DenseBackend::GpuTimes> TimesOf(MicroBatchId) const { return std::nullopt; }

 private:
  static absl::Status NoHeads(int op) {
    return Internal("attention op ", op,
                    ": tokens are exchanged for heads among GPUs whose ranks exchange through the hosts");
  }
};

}  // namespace dovetail::compute
