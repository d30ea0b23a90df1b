#pragma once
#include <vector>

#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/divided_rows.h"
#include "exchange/cuda/step_exchange.h"

namespace dovetail::compute {

// A step between GPUs whose sequences are divided among attention workers (ADR 77), or whose model has linear states
// (ADR 79). q, k, v and gates are made in the compute worker's own memory. One kernel then stores what each worker is
// to have into its slot and tells them all; when all have answered, one kernel brings the parts of o together, and one
// joins what token shards gave, in the order of tokens. What goes where lies in device memory, uploaded with the step's
// tokens, so that a recorded graph depends on how many copies and joins there are and not on whose they are.
//
// Order: Plan for each step; AddTo and Fill; for each op Leave, Arrive.
// Errors: what fails ends the step.
// Threads: reactor-owned, as CudaDense.
class CudaDividedRows {
 public:
  // kInternal: the step cannot cross between GPUs. `peers` by part; they outlive the step.
  absl::Status Plan(const ComputeWorkerCore& core, MicroBatchId id, const std::vector<exchange::GpuExchange*>& peers);

  // The parts of the step's upload: room for them, then their contents and where they will lie on the device.
  void AddTo(kernels::cuda::UploadLayout& layout);
  void Fill(std::byte* host, const std::byte* device, const CudaBatch& batch, const proto::AttentionTable& table);
  // What the launches of the step depend on, other than the contents of memory; behind Fill.
  std::array<uint64_t, 3> Words() const;

  // Behind the kernels that made q, k, v and gates of an op of the group, in batch.query and batch.key_value.
  absl::Status Leave(int op, LayerGroup group, CudaBatch& batch) const;
  // o of all rows, [rows, query_heads * value_dim] in the wire type, in the lane's memory, or in a slot where one
  // worker gave all of it as it lies. `sinks` of the op, or null.
  absl::StatusOr<const void*> Arrive(int op, const proto::AttentionTable& table, const float* sinks,
                                     CudaBatch& batch) const;

  // The workers of some group; for what any of the step's workers is good for.
  const kernels::cuda::ExchangeFan* fan() const { return groups_[0].fan; }

 private:
  // Of a layer group: where its lists are in the upload and on the device.
  struct Group {
    size_t fan_at = 0, leaving_at = 0, arriving_at = 0, joins_at = 0, partials_at = 0;
    const kernels::cuda::ExchangeFan* fan = nullptr;
    const kernels::cuda::ExchangeCopy* leaving = nullptr;
    const kernels::cuda::ExchangeCopy* arriving = nullptr;
    const kernels::cuda::ExchangeJoin* joins = nullptr;
    const kernels::cuda::ExchangePartial* partials = nullptr;
    size_t partial_count = 0;
    int leaving_splits = 1, arriving_splits = 1;
    const std::byte* answer = nullptr;  // o of all rows, where one worker stores it; null: it is brought together
  };
  kernels::cuda::ExchangeCopy CopyOf(const DividedRows::Copy& copy, const proto::SoftmaxSpec& spec,
                                     const CudaBatch& batch) const;
  void FillJoins(const DividedRows::Group& rows, const CudaBatch& batch, std::byte* host, const std::byte* device,
                 Group& group) const;

  std::vector<exchange::GpuExchange*> peers_;  // by part
  DividedRows rows_;
  std::vector<Group> groups_;
};

}  // namespace dovetail::compute
