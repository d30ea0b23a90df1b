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
#include "kernels/op_context.h"
#include "linear_attention/linear_heads.h"
#include "linear_attention/packed_state.h"
#include "proto/linear_switch.h"

namespace dovetail::compute {

// Linear layers of a switch between ranks of a prefill group (proto/linear_switch.h): the heads of one rank over all
// tokens of the group. Between two ranks' tokens a state has the form in which a chain hands it on, so the bits are
// those of a chain, and of one rank alone.
//   Bytes:     the blocks that one rank's tokens leave for these heads, of one op at a time; a state a head between
//   Ownership: of all that it computes, until TakeOutputs
//   Threads:   reactor-owned; Pack, Run and Place do not lock
//   Source:    DeepSpeed Ulysses, arXiv 2309.14509
class SwitchStates {
 public:
  // Both outlive it.
  SwitchStates(kernels::Device& device, const proto::AttentionTable& table, int micro_batches);

  // For the plan that `core` runs in this micro-batch. Does nothing unless that is a rank which switches heads of
  // linear layers.
  //   Errors: kResourceExhausted: no memory
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id);

  // The step's own q, k, v and gates for a rank with these heads (kRankHeads in proto/rank_frames.h).
  std::vector<std::byte> Pack(const ComputeWorkerCore& core, MicroBatchId id, int op, const proto::HeadRange& heads,
                              StepWire& wire) const;

  // One rank's tokens, in the order of the ranks.
  //   Errors: those of the kernels
  absl::Status Run(const ComputeWorkerCore& core, const AttendHeads& attend, StepWire& wire,
                   const kernels::OpContext& context);
  // What that gave, if they were another rank's (kRankOutputs in proto/rank_frames.h). Once.
  std::vector<std::byte> TakeOutputs(MicroBatchId id) { return std::exchange(micro_batches_[id.value()].outputs, {}); }

  // What another rank gave for the step's tokens: outputs to where the layer goes on with them, states to what goes to
  // attention workers.
  void Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire) const;

 private:
  struct MicroBatch {
    std::vector<std::byte> carried;  // the state before the next rank's tokens, head by head
    std::vector<std::byte> outputs;
  };
  struct OpView;
  struct TokenRun;

  OpView ViewOf(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire) const;
  size_t BlockBytes(const proto::LinearSpec& spec) const;
  void TakeBefore(const OpView& view, const proto::HeadRange& heads, std::vector<std::byte>& carried) const;
  void AddHeads(const OpView& view, const TokenRun& run, MicroBatch& batch);
  void Load(const OpView& view, const TokenRun& run, const std::vector<std::byte>& carried);
  void Leave(const OpView& view, const TokenRun& run, MicroBatch& batch);

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  linear_attention::LinearHeads heads_of_op_;
  std::vector<proto::LinearSpec> specs_;     // by group, with the blocks of this memory: one for 64 tokens of a head
  std::unique_ptr<kernels::Buffer> blocks_;  // of one rank's tokens at one op
  std::vector<linear_attention::LinearHead> heads_;
  std::vector<std::byte*> pieces_;  // [head][block]
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace dovetail::compute
