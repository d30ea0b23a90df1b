#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "attention_worker/core/sequence_table.h"
#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/frame.h"
#include "proto/sequence_frames.h"
#include "proto/step_layout.h"

namespace dovetail::attention {

// What the worker's shell must do, in order.
struct SendFrame {
  NodeId to;
  proto::FrameType type{};
  StepId step;
  MicroBatchId micro_batch;
  std::vector<std::byte> message;
};
// Before any kernel of the step that follows.
struct CopyBlocks {
  std::vector<BlockCopy> copies;
};
// A step began: size scratch for it. Its layouts are LayoutOf(micro_batch, group) until the next one.
struct PrepareStep {
  MicroBatchId micro_batch;
};
// q of an op is there: attend what was complete before the step.
struct AttendComplete {
  MicroBatchId micro_batch;
  int op = 0;
  std::span<const std::byte> query;
};
// k and v are there: append, attend the rest, send kPartial{step, micro_batch, op} to `reply_to`.
struct AppendAndFinish {
  MicroBatchId micro_batch;
  int op = 0;
  std::span<const std::byte> key_value;
  NodeId reply_to;
  StepId step;
};
using Action = std::variant<SendFrame, CopyBlocks, PrepareStep, AttendComplete, AppendAndFinish>;

struct AttentionWorkerOptions {
  WorkerId worker;
  Epoch epoch;
  uint32_t kv_blocks = 0;   // capacity
  int micro_batches = 1;    // steps in flight, 1..16
};

struct AttentionWorkerCounters {
  uint64_t steps = 0;
  uint64_t refused_steps = 0;
  uint64_t dropped_frames = 0;   // of another epoch, late, out of order or malformed
};

// The attention worker as a value: frames in, actions out. It owns the KV blocks' bookkeeping, knows shards and
// positions, and neither weights nor tokens nor requests. Single-threaded; deterministic; no clock, socket or kernel.
// Nothing allocates between StepBegin and the last kPartial of a step once buffers have grown to its size.
class AttentionWorkerCore {
 public:
  AttentionWorkerCore(const proto::AttentionTable& table, const AttentionWorkerOptions& options);

  // Applies a frame from `from`; appends actions. A frame that is malformed, late or of another epoch is dropped and
  // counted; a step that cannot run is answered with kStepRefused and changes nothing (lacking memory, nothing but the
  // commit of the step before). A sequence is in one step at a time: releasing or reopening it, or a newer step of
  // another micro-batch, ends the step that it was in.
  void Handle(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
              std::vector<Action>& actions);

  // For the shell, between PrepareStep and the end of the step.
  const proto::StepLayout& LayoutOf(MicroBatchId micro_batch, LayerGroup group) const {
    return micro_batches_[micro_batch.value()].layouts[group.value()];
  }
  const ShardState& ShardOf(MicroBatchId micro_batch, const proto::ShardStep& item) const {
    return micro_batches_[micro_batch.value()].sequences[item.entry]->shards[item.shard];
  }
  const std::vector<KvBlockId>& BlocksOf(BlockSetId set) const { return sequences_.pool().blocks(set); }

  const proto::AttentionTable& table() const { return table_; }
  proto::WorkerStatus status() const { return sequences_.status(); }
  const AttentionWorkerCounters& counters() const { return counters_; }
  SequenceTable& sequences() { return sequences_; }  // visible for tests

 private:
  enum class Phase : uint8_t { kIdle, kAwaitQuery, kAwaitKeyValue };
  struct MicroBatch {
    StepId step;
    NodeId compute;
    Phase phase = Phase::kIdle;
    int next_op = 0;
    std::vector<SequenceState*> sequences;   // by entry, each knowing this micro-batch
    std::vector<proto::StepLayout> layouts;  // by group
  };

  void OnOpen(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
              std::vector<Action>& actions);
  void OnFork(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
              std::vector<Action>& actions);
  void OnRelease(std::span<const std::byte> payload);
  void EndStep(MicroBatch& batch);
  void EndStepOf(SequenceId id);
  void OnProbe(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
               std::vector<Action>& actions);
  void OnStepBegin(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
                   std::vector<Action>& actions);
  void OnQuery(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
               std::vector<Action>& actions);
  void OnKeyValue(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
                  std::vector<Action>& actions);

  absl::Status CheckShardsAreOurs(const std::vector<proto::Shard>& shards) const;
  absl::Status CommitEntries(const proto::FrameHeader& header, const proto::StepBegin& message);
  void Refuse(NodeId to, const proto::FrameHeader& header, bool out_of_memory, std::string reason,
              std::vector<Action>& actions);
  void BuildLayouts(const proto::StepBegin& message, MicroBatch& batch) const;
  // The first op at or after `op` in which this worker has a part, or op_count().
  int NextOp(const MicroBatch& batch, int op) const;
  // The micro-batch that expects this tensor frame now, or null.
  MicroBatch* Expecting(NodeId from, const proto::FrameHeader& header, Phase phase, int64_t payload_bytes);
  template <typename Message>
  void Reply(NodeId to, const proto::FrameHeader& header, proto::FrameType type, const Message& message,
             std::vector<Action>& actions) const;

  const proto::AttentionTable table_;
  const AttentionWorkerOptions options_;
  SequenceTable sequences_;
  std::vector<MicroBatch> micro_batches_;
  AttentionWorkerCounters counters_;
};

}  // namespace dovetail::attention
