#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/device.h"
#include "kernels/op_context.h"
#include "linear_attention/linear_heads.h"
#include "linear_attention/packed_state.h"

namespace dovetail::compute {

// Runs the linear layers of prompts on the compute worker: the same code as on attention workers, so the same bits. The
// state before a step comes from a slot, with the op's answer, or from the rank before; those that the step leaves go
// with k and v (proto/state_blocks.h). Entries run one after the other in as many at a time as their blocks fit into a
// bounded memory.
//   Errors: kResourceExhausted from Prepare: no memory
//   Source: Sun et al. 2024 (LASP)
// Threads: reactor-owned.
class PromptStates {
 public:
  // Bytes of a slot (StateSlots), at most: the state of all linear ops before any position.
  static int64_t SlotBytes(const proto::AttentionTable& table);

  PromptStates(kernels::Device& device, const proto::AttentionTable& table, int micro_batches);

  // For the plan that `core` runs in this micro-batch.
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id);

  // Leaves the results of a linear op and the states for attention workers in the wire.
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire,
                   const kernels::OpContext& context);

  // What Run left for the next rank of a group; given once.
  std::vector<std::byte> TakeRankState(MicroBatchId id);

 private:
  // One entry of the step at one op.
  struct EntryRun {
    const StateEntry* state = nullptr;
    Position ctx_len = 0, end = 0;
    int64_t first_block = 0, blocks = 0;
    proto::StateBlocks before, left, after;  // StatesBefore(ctx_len), StatesLeft, StatesBefore(end)
    size_t pieces = 0;                       // [head][block], of pieces_
    bool Holds(int64_t block) const;         // whether it has memory while the entry runs
    int64_t Held() const;                    // how many do
  };
  struct OpView;

  static EntryRun EntryOf(const proto::StepPlan& plan, const StateEntry& state);
  size_t BlockBytes(const proto::LinearSpec& spec) const;
  // The entries from `first` on that run at once: past the last of them.
  size_t EndOfWave(const ComputeWorkerCore& core, MicroBatchId id, const proto::LinearSpec& spec, size_t first) const;
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  absl::Status GrowSlots(const ComputeWorkerCore& core, MicroBatchId id);
  void AddEntry(const OpView& view, const StateEntry& state);
  void LoadBefore(const OpView& view, const EntryRun& run);
  void LeaveStates(const OpView& view, const EntryRun& run);
  const std::byte* Unpack(const OpView& view, const EntryRun& run, int head, const std::byte* from);
  std::byte* Pack(const OpView& view, const EntryRun& run, int head, const proto::StateBlocks& blocks, std::byte* to);
  std::byte* SlotAt(int slot, int op, int64_t head_bytes, int head) const;

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  linear_attention::LinearHeads heads_of_op_;
  std::vector<proto::LinearSpec> specs_;  // by group, with the blocks of this memory: one for 64 tokens of a head
  std::vector<int64_t> slot_at_;          // by op: bytes from the begin of a slot
  int64_t slot_bytes_ = 0;
  std::vector<std::unique_ptr<kernels::Buffer>> slots_;
  std::unique_ptr<kernels::Buffer> blocks_;  // of the entries that run at once
  std::vector<EntryRun> runs_;
  std::vector<linear_attention::LinearHead> heads_;
  std::vector<std::byte*> pieces_;
  std::vector<std::vector<std::byte>> for_next_rank_;  // by micro-batch
};

}  // namespace dovetail::compute
