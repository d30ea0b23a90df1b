#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/device.h"
#include "kernels/kv_append.h"
#include "kernels/paged_attention.h"

namespace dovetail::compute {

// Attention of a head switch between ranks of a prefill group (proto/head_switch.h): over all tokens of the group and
// the heads of one rank. The same kernels and the same order of sums as elsewhere, so the same bits.
//   Bytes:     K and V of one op, of those tokens and heads: with equal parts about those of the step's own tokens. Not
//              of the prompt scratch.
//   Ownership: of all that it computes, until TakeOutputs
//   Threads:   reactor-owned; Attend and Place do not lock
class SwitchAttention {
 public:
  // Both outlive it.
  SwitchAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                  KvStorage storage = KvStorage::kAsSent);

  // For the plan that `core` runs in this micro-batch, after wire.Prepare; Attend will use `threads`. Does nothing
  // unless that is a rank which switches heads.
  //   Errors: kResourceExhausted: no memory
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire);

  // The step's own q, k and v for a rank that attends to these heads (kRankHeads in proto/rank_frames.h).
  std::vector<std::byte> Pack(const ComputeWorkerCore& core, MicroBatchId id, int op, const proto::HeadRange& heads,
                              StepWire& wire) const;

  // One rank's tokens, in the order of the ranks: appends their K and V, and attends.
  //   Errors: those of the kernels
  absl::Status Attend(const ComputeWorkerCore& core, const AttendHeads& attend, StepWire& wire,
                      kernels::Stream& stream);
  // What that gave, if they were another rank's (kRankOutputs in proto/rank_frames.h). Once.
  std::vector<std::byte> TakeOutputs(MicroBatchId id) { return std::move(micro_batches_[id.value()].outputs); }

  // What another rank gave for the step's tokens goes to where JoinPartials finds it.
  void Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire);

 private:
  struct MicroBatch {
    std::vector<std::byte*> table;  // blocks of the op at hand: [KV head][segment]
    std::vector<kernels::KvAppendItem> appends;
    std::vector<std::byte> outputs;
    std::unique_ptr<kernels::Buffer> blocks, scratch;
    std::unique_ptr<kernels::Buffer> partial;  // of the step's tokens: what wire.locals() point to
  };

  kernels::AttentionShape ShapeOf(LayerGroup group) const;
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  kernels::KvBlockTable FillTable(const ComputeWorkerCore& core, MicroBatchId id, const proto::HeadRange& heads);
  void FillAppends(const ComputeWorkerCore& core, const AttendHeads& attend, const proto::HeadRange& heads,
                   const kernels::KvBlockTable& table, StepWire& wire);
  kernels::AttentionItem ItemOf(const ComputeWorkerCore& core, const AttendHeads& attend, const proto::HeadRange& heads,
                                StepWire& wire) const;
  void PlaceWhole(LayerGroup group, const proto::HeadRange& heads, std::span<const std::byte> outputs,
                  StepWire& wire) const;
  void PlacePartials(MicroBatch& batch, LayerGroup group, const proto::HeadRange& heads,
                     std::span<const std::byte> outputs, StepWire& wire) const;

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  const KvStorage storage_;
  const size_t block_bytes_;
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace dovetail::compute
