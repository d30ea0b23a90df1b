#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "attention_worker/core/frame_arrived.h"
#include "attention_worker/core/sequence_table.h"
#include "attention_worker/core/state_snapshot.h"
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
  Epoch epoch;  // the concerned attention worker's: this one's own; for a move the target's
};
// Sends kKeyValue{step, micro_batch, op} of OutgoingMoveOf(slot) to its target: rows gathered from the blocks here.
struct SendMovedKeyValue {
  MicroBatchId micro_batch;
  int slot = 0;
  int op = 0;
};
// Before any kernel of the step that follows.
struct CopyBlocks {
  std::vector<BlockCopy> copies;
};
// A step began: size scratch for it. Its layouts are LayoutOf(micro_batch, group) until the next one.
struct PrepareStep {
  MicroBatchId micro_batch;
  NodeId compute;         // that it came from; of a part of a move, the attention worker
  bool in_frames = true;  // false: no frames bring q, k and v, and none takes answers; the ops are those of TakeOp()
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
  bool pieces_first = false;  // send it behind the last GiveRows of the op, which will follow
};
// K and V of earlier tokens that were asked for: send kEarlierRows{step, micro_batch, op} with this piece of the op's
// layout.
struct GiveRows {
  MicroBatchId micro_batch;
  int op = 0;
  int piece = 0;
  NodeId reply_to;
  StepId step;
  bool last = false;  // and then what AppendAndFinish gave
};
// The states before an op of the step are asked for: send kPartial{step, micro_batch, op} with them to `reply_to`. Its
// k and v will follow.
struct AnswerStates {
  MicroBatchId micro_batch;
  int op = 0;
  NodeId reply_to;
  StepId step;
};
// With digests: give each set's digest to TakeDigest(), in order, before the action that follows.
struct DigestBlocks {
  std::vector<BlockSetId> sets;
};
// Answer an OpenSequence, whose cached blocks have been compared with their digests by now: call AnswerOpen().
struct AnswerOpened {
  NodeId to;
  proto::FrameHeader header;
  SequenceId sequence;
};
// Begin to send the sequence of a move, whose blocks have been compared with their digests by now: call BeginMove().
struct SendMove {
  int slot = 0;
};
using Action = std::variant<SendFrame, SendMovedKeyValue, CopyBlocks, PrepareStep, AttendComplete, AppendAndFinish,
                            GiveRows, AnswerStates, DigestBlocks, AnswerOpened, SendMove>;

// A sequence on its way to another attention worker: a part of its tokens at a time, op by op, of which
// proto::kMoveOpsAhead may await their answers.
struct OutgoingMove {
  bool active = false;
  proto::MoveSequence order;
  NodeId scheduler;
  SequenceTable::Part part;
  StepId step;                             // of the part
  int op = 0;                              // whose answer comes next
  int next = 0, unanswered = 0;            // the op to be sent next, and how many await their answers
  std::vector<proto::StepLayout> layouts;  // by group, of the part
};

// Half for prefixes that a hybrid's states can be taken up from: a snapshot without the K and V before it is worth
// nothing, nor are they without it.
inline constexpr int kSnapshotPercent = 50;

struct AttentionWorkerOptions {
  WorkerId worker;
  Epoch epoch;
  uint32_t kv_blocks = 0;  // capacity
  int micro_batches = 1;   // steps in flight, 1..16
  // Of the blocks, those that snapshots of linear states may keep when no sequence holds them: 0..100.
  int snapshot_percent = kSnapshotPercent;
  uint64_t model_digest = 0;         // of model, KV type and attention table: states of another are refused
  uint64_t block_bytes = 0;          // of a KvBlock; 0: linear states are not given to other workers
  bool poison_freed = false;         // fill KvBlocks that no sequence holds with NaN: for tests, what reads one shows
  Digests digests = Digests::kNone;  // --kv-checksums
  bool deterministic = false;        // as MakeAttentionBackend has it
  bool reports_cache = false;        // kCacheChanged to the scheduler, whenever something did
};

struct AttentionWorkerCounters {
  uint64_t steps = 0;
  uint64_t moved_parts = 0;  // taken in
  uint64_t refused_steps = 0;
  uint64_t dropped_frames = 0;     // of another epoch, late, out of order or malformed
  uint64_t digests_compared = 0;   // of block sets, with those that they had when they were finished
  uint64_t damaged_sets = 0;       // of those, that had changed
  uint64_t damaged_blocks = 0;     // KvBlocks of those
  uint64_t damaged_sequences = 0;  // steps and moves refused because blocks were not what was written
};

// The attention worker as a value: frames in, actions out. It owns the KV blocks' bookkeeping, knows shards and
// positions, and neither weights nor tokens nor requests. Nothing allocates between StepBegin and the last kPartial of
// a step once buffers have grown to its size. A move ends with SequenceMoved, unless the scheduler releases or goes on
// with the sequence here: then it is forgotten.
// Threads: thread-compatible; deterministic; no clock, socket or kernel.
class AttentionWorkerCore {
 public:
  AttentionWorkerCore(const proto::AttentionTable& table, const AttentionWorkerOptions& options);

  // Applies a frame; appends actions, also of steps whose frames this one lets go on. A frame that is
  // malformed, late, of another epoch or comes again is dropped and counted, so that nothing is appended or taken back
  // twice; a step that cannot run is answered with kStepRefused and changes nothing (lacking memory, nothing but the
  // commit of the step before). A sequence is in one step at a time: releasing or reopening it, or a newer step of
  // another micro-batch, ends the step that it was in.
  void Handle(const FrameArrived& frame, std::vector<Action>& actions);

  // Steps of this peer end, and what it has sent for them is forgotten: its memory goes.
  void LosePeer(NodeId node);

  // What the actions of the same name ask for.
  void TakeDigest(BlockSetId set, uint64_t digest);
  void AnswerOpen(const AnswerOpened& answer, std::vector<Action>& actions);
  void BeginMove(int slot, std::vector<Action>& actions);

  // What Handle asked for a move could not be done.
  void FailMove(int slot, std::string why, std::vector<Action>& actions) {
    if (moves_[slot].active) EndMove(moves_[slot], false, std::move(why), actions);
  }

  // Of a step whose payloads cross without frames: the op that is to be run next, which counts as run. nullopt: there
  // is none left.
  std::optional<int> TakeOp(MicroBatchId micro_batch);

  // For the shell, between PrepareStep and the end of the step.
  const proto::StepLayout& LayoutOf(MicroBatchId micro_batch, LayerGroup group) const {
    return micro_batches_[micro_batch.value()].layouts[group.value()];
  }
  const ShardState& ShardOf(MicroBatchId micro_batch, const proto::ShardStep& item) const {
    return micro_batches_[micro_batch.value()].sequences[item.entry]->shards[item.shard];
  }
  const OutgoingMove& OutgoingMoveOf(int slot) const { return moves_[slot]; }
  const ShardState& ShardOf(const OutgoingMove& move, const proto::ShardStep& item) {
    return sequences_.Find(move.order.sequence)->shards[item.shard];
  }
  // What crosses for an item of a move, where `op` is a linear state.
  StateSnapshot SnapshotOf(const proto::ShardStep& item, int op) const;
  // False: the set was given back since it was named, because it was damaged.
  bool Holds(BlockSetId set) const { return sequences_.pool().Holds(set); }
  // Requires: Holds(set).
  const std::vector<KvBlockId>& BlocksOf(BlockSetId set) const { return sequences_.pool().blocks(set); }
  // Blocks of this number and above were never used.
  uint32_t begun_blocks() const { return sequences_.pool().begun(); }
  // With poison_freed: the blocks that were freed since this was called last and are still free.
  std::vector<KvBlockId> TakeFreed() { return sequences_.pool().TakeFreed(); }

  StepId StepOf(MicroBatchId micro_batch) const { return micro_batches_[micro_batch.value()].step; }
  const proto::AttentionTable& table() const { return table_; }
  WorkerStatus status() const { return sequences_.status(); }
  const AttentionWorkerCounters& counters() const { return counters_; }
  // Whether everything that must be true between two frames is. For tests, which ask after every frame.
  // Errors: kInternal says what is not so: a bug. Not while a test has damaged what it holds.
  absl::Status CheckInvariants() const;
  SequenceTable& sequences() { return sequences_; }  // for tests, which also damage what it holds

 private:
  // kGiveRows: k and v of next_op are in place, and pieces of earlier tokens still have to be asked for.
  enum class Phase : uint8_t { kIdle, kAwaitQuery, kAwaitKeyValue, kGiveRows };
  struct MicroBatch {
    StepId step;
    NodeId compute;
    bool in_frames = true;  // as PrepareStep has it
    Phase phase = Phase::kIdle;
    int next_op = 0;
    std::vector<SequenceState*> sequences;   // by entry, each knowing this micro-batch
    std::vector<proto::StepLayout> layouts;  // by group
    proto::PrefillPart part;                 // of a prefill group, with one entry
    // Of next_op, until the ranks before this one have written theirs. Their senders keep them until they are answered
    // or lost (LosePeer).
    std::optional<std::span<const std::byte>> held_query, held_key_value;
    int pieces_asked = 0, pieces_given = 0;  // of next_op
  };

  bool WithDigests() const { return options_.digests == Digests::kOfFinishedBlocks; }
  void DigestFinished(std::vector<Action>& actions);
  void HandleFrame(const FrameArrived& frame, std::vector<Action>& actions);
  void ReportCache(size_t at, std::vector<Action>& actions);
  void OnOrder(const FrameArrived& frame, std::vector<Action>& actions);
  void OnOpen(NodeId from, const proto::FrameHeader& header, const proto::OpenSequence& message,
              std::vector<Action>& actions);
  void OnFork(NodeId from, const proto::FrameHeader& header, const proto::ForkSequence& message,
              std::vector<Action>& actions);
  void OnRelease(const proto::ReleaseSequence& message);
  bool CameBefore(const proto::FrameHeader& order);
  uint32_t BitOf(const MicroBatch& batch) const { return uint32_t{1} << (&batch - micro_batches_.data()); }
  void EndStep(MicroBatch& batch);
  void EndStepOf(SequenceId id);
  void EndStepsBefore(const proto::OpenSequence& extension);
  void OnProbe(NodeId from, const proto::FrameHeader& header, const proto::PrefixProbe& message,
               std::vector<Action>& actions);
  void OnStepBegin(const FrameArrived& frame, std::vector<Action>& actions);
  bool CommitsStep(NodeId from, const proto::FrameHeader& header, const proto::StepBegin& message,
                   std::vector<Action>& actions);
  void BeginStep(NodeId from, const proto::FrameHeader& header, const proto::StepBegin& message,
                 std::vector<Action>& actions);
  void OnFill(NodeId from, const proto::FrameHeader& header, const proto::StepBeginEntry& entry,
              std::vector<Action>& actions);
  // moves.cc
  void OnMove(NodeId from, const proto::MoveSequence& order, std::vector<Action>& actions);
  void OnMoveAnswer(const FrameArrived& frame, std::vector<Action>& actions);
  void SendPart(OutgoingMove& move, Position begin, std::vector<Action>& actions);
  void SendOps(OutgoingMove& move, std::vector<Action>& actions) const;
  void TakeAnswer(OutgoingMove& move, std::vector<Action>& actions);
  void EndMove(OutgoingMove& move, bool moved, std::string reason, std::vector<Action>& actions);
  void ForgetMoveOf(SequenceId id);
  void AddPart(const SequenceState& sequence, size_t first_shard, const SequenceTable::Part& part,
               std::vector<proto::StepLayout>& layouts) const;
  void FinishLayouts(std::vector<proto::StepLayout>& layouts) const;
  void FinishPart(std::vector<proto::StepLayout>& layouts) const;
  int NextOp(const std::vector<proto::StepLayout>& layouts, int op) const;
  Phase PhaseAt(const MicroBatch& batch) const;  // of next_op
  void OnQuery(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
               std::vector<Action>& actions);
  void OnKeyValue(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload,
                  std::vector<Action>& actions);

  absl::Status CheckShardsAreOurs(const std::vector<proto::Shard>& shards) const;
  absl::Status CheckEntry(const proto::FrameHeader& header, const proto::StepBeginEntry& entry, StepId begins,
                          Position ctx_len) const;
  absl::Status CommitEntries(const proto::FrameHeader& header, const proto::StepBegin& message);
  absl::Status AppendEntries(const proto::StepBegin& message, bool joins, std::vector<Action>& actions);
  bool JoinsGroup(const proto::StepBegin& message) const;
  bool MayUse(const MicroBatch& batch, int op) const;
  bool AsksBeforeGroup(const MicroBatch& batch, int op) const;
  void Reached(MicroBatch& batch, int next_op);
  void LetGroupGoOn(const SequenceState& sequence, std::vector<Action>& actions);
  void TakeQuery(MicroBatch& batch, std::span<const std::byte> query, std::vector<Action>& actions);
  void TakeKeyValue(MicroBatch& batch, std::span<const std::byte> key_value, std::vector<Action>& actions);
  void OnAskRows(NodeId from, const proto::FrameHeader& header, std::vector<Action>& actions);
  void GiveAskedRows(MicroBatch& batch, std::vector<Action>& actions);
  std::vector<SequenceId> DamagedIn(const proto::StepBegin& message);
  std::vector<SequenceId> IncompleteIn(StepId step, const proto::StepBegin& message) const;
  void Refuse(NodeId to, const proto::FrameHeader& header, const proto::StepRefused& refusal,
              std::vector<Action>& actions);
  void BuildLayouts(const proto::StepBegin& message, MicroBatch& batch) const;
  // The first op at or after `op` in which this worker has a part, or op_count().
  int NextOp(const MicroBatch& batch, int op) const { return NextOp(batch.layouts, op); }
  // The micro-batch that expects this tensor frame now, or null.
  MicroBatch* Expecting(NodeId from, const proto::FrameHeader& header, Phase phase, int64_t payload_bytes);
  template <typename Message>
  void Reply(NodeId to, const proto::FrameHeader& header, proto::FrameType type, const Message& message,
             std::vector<Action>& actions) const;

  const proto::AttentionTable table_;
  const AttentionWorkerOptions options_;
  SequenceTable sequences_;
  std::vector<MicroBatch> micro_batches_;  // those of compute workers, then one for each move that comes in
  std::array<OutgoingMove, proto::kMoveSlots> moves_;
  uint64_t last_order_ = 0;          // of the scheduler's frames about sequences
  std::optional<NodeId> scheduler_;  // that sent one
  AttentionWorkerCounters counters_;
};

}  // namespace dovetail::attention
