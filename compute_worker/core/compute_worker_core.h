#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "compute_worker/core/prompt_scratch.h"
#include "compute_worker/core/rank_inbox.h"
#include "compute_worker/core/rank_progress.h"
#include "compute_worker/core/rank_tensor.h"
#include "compute_worker/core/state_slots.h"
#include "compute_worker/core/step_program.h"
#include "proto/attention_spec.h"
#include "proto/head_switch.h"
#include "proto/sequence_frames.h"
#include "proto/step_layout.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// ---- events ----

struct PlanArrived {
  proto::StepPlan plan;
};
struct DenseDone {  // the RunDense or AttendPrompts of this micro-batch has finished
  MicroBatchId micro_batch;
};
struct SampleBegun {  // this step's tokens are being drawn, and the next step may take them on the device
  MicroBatchId micro_batch;
};
struct PartialArrived {
  NodeId from;
  Epoch epoch;
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  std::span<const std::byte> payload;  // stays valid until the next op's query is sent
};
// A piece of the K and V of earlier tokens that an op asked an attention worker for (proto/gather_frames.h).
struct EarlierRowsArrived {
  NodeId from;
  Epoch epoch;
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  int piece = 0;
  RankTensor rows;
};
struct RankStateArrived {  // the state that the rank before this one in its prefill group left
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  RankTensor state;
};
// K and V of a softmax op that a rank before this one has sent; or a later one, if the plan says that it gives them
// back.
struct RankRowsArrived {
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;
  RankTensor rows;
};
struct RankAttended {  // another rank has done with the op's K and V, which this one sent it
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // that rank; in a ring, where it is the next one, the rank whose K and V they are
};
// Of a softmax op and another rank's tokens: in a head switch q, k and v of the heads that are attended here; with
// pass-q the queries of a later rank to what is here.
struct RankHeadsArrived {
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;
  RankTensor rows;
};
// What another rank's attention gave for this one's tokens: with the heads of that one, or over its tokens.
struct RankOutputsArrived {
  StepId step;
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;
  RankTensor outputs;
};
struct RankRowsKept {  // KeepRankRows has ended
  MicroBatchId micro_batch;
  StepId step;
  int op = 0;
  int rank = 0;
  bool kept = false;  // they are in the prompt's blocks; else nothing more of later ranks is kept
};
struct StepRefused {
  NodeId from;
  Epoch epoch;
  StepId step;
  MicroBatchId micro_batch;
  proto::StepRefused refused;
};
struct SampleDone {
  MicroBatchId micro_batch;
  proto::StepResult result;
};
struct StepFailed {  // the shell could not do what it was asked: a kernel refused, a frame could not be sent, no memory
  MicroBatchId micro_batch;
  absl::Status status;
  int unanswered = -1;  // the part whose worker's GPU did not answer, if that is why and it is known
};
struct AttentionWorkerLost {  // ends the steps that it has a part in and later ones that name it: kWorkerUnreachable
  WorkerId worker;
  Epoch epoch;
};
struct StepWithdrawn {  // the scheduler does not need its result any more: it ends as kWorkerFailed, or has ended
  StepId step;
  MicroBatchId micro_batch;
};
using Event = std::variant<PlanArrived, DenseDone, SampleBegun, PartialArrived, EarlierRowsArrived, RankStateArrived,
                           RankRowsArrived, RankAttended, RankRowsKept, RankHeadsArrived, RankOutputsArrived,
                           StepRefused, SampleDone, StepFailed, AttentionWorkerLost, StepWithdrawn>;

// ---- actions ----

struct SendStepBegin {
  NodeId to;
  Epoch epoch;
  StepId step;
  MicroBatchId micro_batch;
  proto::StepBegin message;
};
struct PrepareStep {  // size buffers for PlanOf(micro_batch)
  MicroBatchId micro_batch;
};
struct RunDense {
  MicroBatchId micro_batch;
  int index = 0;
};
struct SendQuery {  // to every part of PartsOf(micro_batch) that has items in the op's group
  MicroBatchId micro_batch;
  int op = 0;
};
struct SendKeyValue {
  MicroBatchId micro_batch;
  int op = 0;
};
// kAskRows, to an attention worker, behind k and v of the op and all that was sent before.
struct AskRows {
  MicroBatchId micro_batch;
  int op = 0;
  int piece = 0;
  NodeId to;
  Epoch epoch;
};
// A piece into the blocks of its prompt, before these are attended to.
struct KeepEarlierRows {
  MicroBatchId micro_batch;
  int op = 0;
  int part = 0;  // of PartsOf(micro_batch)
  int piece = 0;
  RankTensor rows;  // as kEarlierRows has them
};
// PromptsOf(micro_batch), with the op's k and v appended to their blocks; of a linear op StatesOf(micro_batch). Ends
// with DenseDone.
struct AttendPrompts {
  MicroBatchId micro_batch;
  int op = 0;
};
struct SendRankState {  // the linear op's state after the step's last token, to the next rank of the group
  MicroBatchId micro_batch;
  int op = 0;
  proto::RankAddress to;
};
// k and v of the op to other ranks of the group: to each of those of the step's new tokens from `first_row` on.
struct SendRankRows {
  struct Receiver {
    proto::RankAddress to;
    int64_t first_row = 0;
  };
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // this one's
  std::vector<Receiver> receivers;
};
// The next part of AttendPrompts in a ring: over K and V of an earlier rank, RankRows of it. Ends with DenseDone.
struct AttendShard {
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // whose they are
};
struct ForwardRankRows {  // K and V of an earlier rank to the next one, from a row of them on
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;     // whose they are
  RankTensor rows;  // as kRankRows has them
  int64_t first_row = 0;
  proto::RankAddress to;
};
// K and V of a later rank, for the prompt's next part: into the blocks of PartToKeepIn, if they still are the prompt's.
// Also after the step has ended. Ends with RankRowsKept.
struct KeepRankRows {
  MicroBatchId micro_batch;
  StepId step;
  int op = 0;
  int rank = 0;     // that rank
  RankTensor rows;  // RowsFrom it, as kRankRows has them
};
struct SendRankAttended {  // RankAttended, to the rank whose K and V they were
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // RankAttended::rank
  proto::RankAddress to;
};
// q, k and v of a softmax op, of the step's tokens: to each other rank those of the heads that it attends to.
struct SendRankHeads {
  struct Receiver {
    proto::RankAddress to;
    proto::HeadRange kv_heads;
  };
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // this one's
  std::vector<Receiver> receivers;
};
// All that a rank's tokens see of tokens from SwitchBegin on, with the heads that are attended here; in the order of
// the ranks, whose K and V (RankHeads) are kept for the later ones. What it gives for the step's own tokens goes to
// their rows, for those of others TakeRankOutputs has it. Ends with DenseDone.
struct AttendHeads {
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // whose tokens
};
// q of the step's first rows to ranks before it, which attend to them over their own tokens.
struct SendRankQueries {
  struct Receiver {
    proto::RankAddress to;
    int64_t rows = 0;
  };
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // this one's
  std::vector<Receiver> receivers;
};
// A later rank's queries (RankHeads) over this one's tokens, PassQShard. TakeRankOutputs has what that gives. Also when
// the step is at a later op, or has drawn its token. Ends with DenseDone.
struct AttendQueries {
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // whose queries
};
struct SendRankOutputs {  // of the AttendHeads or AttendQueries before, to the rank whose tokens they are
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;  // this one's
  proto::RankAddress to;
};
struct PlaceRankOutputs {  // what another rank gave for the step's tokens goes to their rows
  MicroBatchId micro_batch;
  int op = 0;
  int rank = 0;        // whose heads, or over whose tokens
  RankTensor outputs;  // as kRankOutputs has them
};
struct Sample {  // final norm, head, choice of tokens; ends with SampleDone
  MicroBatchId micro_batch;
};
struct FinishStep {  // of a step that takes another's draws, not before that one's
  MicroBatchId micro_batch;
  proto::StepResult result;
};
using Action = std::variant<SendStepBegin, PrepareStep, RunDense, SendQuery, SendKeyValue, AskRows, KeepEarlierRows,
                            AttendPrompts, AttendShard, SendRankState, SendRankRows, ForwardRankRows, KeepRankRows,
                            SendRankAttended, SendRankHeads, AttendHeads, SendRankQueries, AttendQueries,
                            SendRankOutputs, PlaceRankOutputs, Sample, FinishStep>;

// One attention worker's part in a micro-batch's step.
struct WorkerPart {
  WorkerId worker;
  Epoch epoch;
  NodeId node;
  proto::StepBegin begin;
  std::vector<proto::StepLayout> layouts;  // by layer group
  std::span<const std::byte> partial;      // of the op at hand, once it has arrived
  bool awaited = false;
  int pieces_asked = 0, pieces_kept = 0;  // of the op at hand, of earlier tokens' K and V
  // Ops whose k and v went without a q and were not answered yet, oldest first.
  std::vector<int> unanswered;
};

// An entry of a step whose prompt is attended here from `begin` on; what comes before is attended on attention
// workers. Of that part, K and V from `gather_begin` to `gather_end`, or to where the step begins, come from there with
// each op's answer.
struct PromptEntry {
  int entry = 0;
  // A multiple of 64: where `part` begins, but in a ring, in a switch and with pass-q where the group does.
  Position begin = 0;
  const PromptScratch::Part* part = nullptr;  // null in a switch and with pass-q, which need none
  Position gather_begin = proto::kOpenEnd;    // kOpenEnd: none
  Position gather_end = proto::kOpenEnd;
  bool from_ranks = false;  // those from the group's first token on come from the ranks before (RankRows)
  bool ring = false;        // with from_ranks: one after the other (AttendShard), and `part` has the step's own tokens
  bool switches = false;    // each rank attends to some heads of all tokens of the group (AttendHeads)
  bool asks_ranks = false;  // each rank attends to its own tokens for itself and the later ones (AttendQueries)
};

// An entry of a step whose linear layers run here: states cross for it, and no tokens (proto/state_blocks.h).
struct StateEntry {
  int entry = 0;
  bool held = false;             // the state before the step is in the slot; else it comes with the op's first answer
  bool chained = false;          // or from the rank before (RankState)
  bool passed_on = false;        // the state after the step goes to the next rank
  bool switched = false;         // each rank runs some heads over all tokens of the group (AttendHeads)
  int slot = StateSlots::kNone;  // where the state after the step is kept for the next part of the prompt
};

struct AttentionWorkerAddress {
  WorkerId worker;
  Epoch epoch;
  NodeId node;
  bool linked = false;    // SetLinked
  bool same_gpu = false;  // it has the GPU of this worker and this process: it attends prompts itself
};

// A rank of a group does not go on while a later one has so many ops of its K and V and has not attended to them, or an
// earlier one has not put them where it keeps them: what a rank that is behind holds is bounded by that. With pass-q
// not while it keeps those of so many ops itself, about which later ranks have not asked yet.
inline constexpr int kRankOpsAhead = 4;
// In a ring it gives the next rank no more while that has so many tensors which it has not attended to and handed on:
// the one that it attends to, and the next.
inline constexpr int kRingShards = 2;

// An attention worker gathers so many in about a millisecond, for which other steps wait.
inline constexpr int64_t kGatherPieceBytes = int64_t{2} << 20;

struct ComputeWorkerOptions {
  int micro_batches = 1;  // in flight, 1..16
  int max_step_tokens = 2048;
  int32_t vocab_size = 0;
  // Prompts: an entry of so many new tokens is attended here, as far as the scratch goes; others on attention workers.
  int prompt_tokens = 16;
  uint32_t prompt_blocks = 0;      // of the scratch: 64 tokens x a KV head x an op; 0: all on attention workers
  bool linear_prompts = false;     // linear layers of such entries run here, too
  bool rank_rows = false;          // ranks of a group may give each other K and V of such entries
  bool rank_ring = false;          // and these may go round
  bool rank_switch = false;        // and they may exchange tokens for heads
  bool rank_state_switch = false;  // in linear layers, too
  proto::HeadPartials head_partials = proto::HeadPartials::kOfSubtrees;  // of that: the ranks of a group have one kind
  bool rank_queries = false;         // and they may ask each other about earlier tokens
  bool rank_rows_on_device = false;  // these lie on the sender's device, where the other ranks' devices reach them
  int state_slots = 0;               // prompts whose states are kept from part to part
  int key_values_in_flight = 4;      // ops whose k and v an attention worker has not answered: paces what prompts send
  // Earlier tokens' K and V for an op come in pieces of so many bytes, if they have more; 1..kMaxGatherPieceBytes.
  int64_t gather_piece_bytes = kGatherPieceBytes;
  bool hand_over_at_end = false;  // k and v of steps that ask nothing go when all layers are done; then the above is
                                  // the number of ops
  // Steps that cross through the hosts have a stream of their own on the device, so that they do not queue behind steps
  // that stay on it.
  bool hosts_apart = false;
  // On a GPU, a token's results depend on its sequence only, whatever else is in its step (docs/operations.md).
  bool deterministic = false;
};

struct ComputeWorkerCounters {
  uint64_t steps = 0;
  uint64_t refused_plans = 0;
  uint64_t dropped_frames = 0;      // late, repeated, of another epoch or step
  uint64_t prompt_tokens_here = 0;  // attended by this worker
  uint64_t state_tokens_here = 0;   // whose linear layers it ran
};

// The compute worker as a value: one state machine per micro-batch, from its plan through the layers to its result. It
// sends q before k and v, waits for every partial, and owns nothing between steps but a scratch of prompts that it can
// do without. While one micro-batch waits for attention another runs its dense pieces. Allocates only when a plan
// arrives. A plan whose tokens are still to be drawn waits, one at a time, until the step before it has drawn them or
// has got as far as that on the device.
// Threads: thread-compatible; deterministic; no clock, socket or kernel.
class ComputeWorkerCore {
 public:
  ComputeWorkerCore(const proto::AttentionTable& table, StepProgram program, const ComputeWorkerOptions& options);

  // Attention workers that plans may name. A later call with the same worker replaces its epoch and node.
  void AddAttentionWorker(const AttentionWorkerAddress& address);

  // Whether that worker's device and this one's exchange layers themselves; not, until told so. For plans that arrive
  // from here on: a prompt that lies whole on a linked worker is attended here only if all that it sees is here, and
  // else there, so that nothing of it crosses through the hosts. Not of models with linear states.
  void SetLinked(NodeId node, bool linked);

  // Applies an event; appends actions, to be done in order. A plan that cannot run finishes at once with kWorkerFailed
  // and says why; one that names a worker that is not connected, with kWorkerUnreachable.
  void Handle(Event event, std::vector<Action>& actions);

  // A step that is tried again has another number: a plan that is not newer than the last of its micro-batch came
  // before, and Handle drops it.
  bool CameBefore(const proto::StepPlan& plan) const;

  const proto::StepPlan& PlanOf(MicroBatchId id) const { return micro_batches_[id.value()].plan; }
  const std::vector<WorkerPart>& PartsOf(MicroBatchId id) const { return micro_batches_[id.value()].parts; }
  const std::vector<PromptEntry>& PromptsOf(MicroBatchId id) const { return micro_batches_[id.value()].prompts; }
  const std::vector<StateEntry>& StatesOf(MicroBatchId id) const { return micro_batches_[id.value()].states; }
  // What the rank before left of a linear op; empty: it has not come. Valid until the step ends.
  std::span<const std::byte> RankState(MicroBatchId id, int op) const { return inbox_.Find(id, op, kChainRank); }
  // Of a step with PromptEntry::from_ranks: the tokens of a rank before it whose K and V it needs in a softmax op, or
  // of a later one that the next group needs, maybe none (begin == end). Of ranks before it also these, as kRankRows
  // has them (proto/rank_frames.h), while the op is attended: in host memory, or where the backend took them to.
  proto::TokenRange RowsFrom(MicroBatchId id, int op, int rank) const;
  std::span<const std::byte> RankRows(MicroBatchId id, int op, int rank) const { return inbox_.Find(id, op, rank); }
  // In a switch, and with pass-q: what another rank sent of its tokens, as kRankHeads has it, while they are attended
  // to.
  std::span<const std::byte> RankHeads(MicroBatchId id, int op, int rank) const { return inbox_.Find(id, op, rank); }
  // Where K and V of later ranks are to be put (KeepRankRows). Null: they are not to be kept any more. Valid until the
  // next event.
  const PromptScratch::Part* PartToKeepIn(MicroBatchId id, StepId step) const;
  // With pass-q: which of kRankOpsAhead places K and V of the step's own tokens have. Of the softmax op at hand, and of
  // those about which later ranks have not asked yet.
  int PlaceOfKeys(MicroBatchId id, int op) const;
  // In a ring and with pass-q: the tokens of which that rank has K and V; from a multiple of 64 on.
  proto::TokenRange ShardOf(MicroBatchId id, int rank) const;
  // What other ranks sent and is kept. For tests.
  size_t rank_bytes() const { return inbox_.bytes(); }
  // The step whose draws are tokens of this one: its plan is PlanOf it. Nothing: all tokens are known.
  std::optional<MicroBatchId> DrawnBy(MicroBatchId id) const { return micro_batches_[id.value()].drawn_by; }
  const PromptScratch& scratch() const { return scratch_; }
  const ComputeWorkerOptions& options() const { return options_; }
  const proto::AttentionTable& table() const { return table_; }
  const ComputeWorkerCounters& counters() const { return counters_; }
  bool running(MicroBatchId id) const { return micro_batches_[id.value()].running; }
  bool idle() const;
  // The step's plan was answered without the core: drops what the rank before has sent for it.
  void DropBefore(MicroBatchId id, StepId step);
  // Whether everything that must be true between two events is: answers that are awaited add up, and no step waits for
  // nothing. For tests, which ask after every event.
  // Errors: kInternal says what is not so: a bug.
  absl::Status CheckInvariants() const;

 private:
  // Of a step whose plan says that later ranks give back: what of that has come. Also after the step has ended.
  struct Keeping {
    bool reserved = false;             // there was room for it when the step began
    bool on = false;                   // and it is kept
    std::vector<uint32_t> came, kept;  // by op: bit r is K and V of rank r
  };
  struct MicroBatch {
    bool running = false;
    bool aborted = false;  // a worker refused: finish as soon as the dense piece at hand is done
    bool dense_in_flight = false;
    bool drawing = false;  // SampleBegun
    StepId newest;         // of its plans that came, whether they run, wait or were refused
    std::optional<MicroBatchId> drawn_by;
    StepId drawn_in;                          // that one's step: another may run there by now
    std::optional<proto::StepResult> behind;  // of the step that takes its draws, which has failed before it ends
    std::optional<proto::StepResult> last;    // of the step that finished last: what it drew, or why it failed
    proto::StepPlan plan;
    std::vector<WorkerPart> parts;
    std::vector<PromptEntry> prompts;
    std::vector<StateEntry> states;
    bool hold_key_values = false;           // hand_over_at_end, and nothing is asked
    std::optional<proto::StepResult> done;  // all but the last answers
    size_t stage = 0;
    int awaiting = 0;  // partials still to come
    proto::StepResult failure;
    std::vector<std::vector<int>> unattended;  // by rank: ops whose K and V went there and were not attended to
    RingProgress ring;
    SwitchProgress heads;
    PassQProgress pass_q;
    Keeping keeping;
  };
  static constexpr int kChainRank = 0;  // in the inbox: states come from one rank only

  void On(PlanArrived event, std::vector<Action>& actions);
  void On(DenseDone event, std::vector<Action>& actions);
  void On(SampleBegun event, std::vector<Action>& actions);
  void On(PartialArrived event, std::vector<Action>& actions);
  void On(EarlierRowsArrived event, std::vector<Action>& actions);
  void On(RankStateArrived event, std::vector<Action>& actions);
  void On(RankRowsArrived event, std::vector<Action>& actions);
  void On(RankAttended event, std::vector<Action>& actions);
  void On(RankHeadsArrived event, std::vector<Action>& actions);
  void On(RankOutputsArrived event, std::vector<Action>& actions);
  void On(RankRowsKept event, std::vector<Action>& actions);
  void On(StepRefused event, std::vector<Action>& actions);
  void On(SampleDone event, std::vector<Action>& actions);
  void On(const StepFailed& event, std::vector<Action>& actions);
  void On(AttentionWorkerLost event, std::vector<Action>& actions);
  void On(StepWithdrawn event, std::vector<Action>& actions);
  void Abort(MicroBatch& batch, proto::StepResult failure, std::vector<Action>& actions);
  void Abort(MicroBatch& batch, const WorkerPart& by, proto::StepStatus status, const std::string& reason,
             std::vector<Action>& actions, std::vector<SequenceId> damaged = {});

  void BeginWaiting(std::vector<Action>& actions);
  void Begin(proto::StepPlan plan, std::optional<MicroBatchId> drawn_by, std::vector<Action>& actions);
  absl::Status CheckPlan(const proto::StepPlan& plan, std::optional<MicroBatchId> drawn_by) const;
  absl::Status BuildParts(MicroBatch& batch, proto::StepResult& failure) const;
  absl::Status AddEntry(MicroBatch& batch, int entry, proto::StepResult& failure) const;
  void BeginPrompts(MicroBatch& batch);
  proto::EntryExchange ExchangeOf(const MicroBatch& batch, int entry) const;
  void BeginStates(MicroBatch& batch);
  PromptEntry BeginPrompt(const proto::StepEntry& entry);
  PromptEntry BeginLinkedPrompt(const proto::StepEntry& entry);
  bool IsWholeOnOne(const proto::StepEntry& entry, bool AttentionWorkerAddress::*how) const;
  PromptEntry BeginPromptFromRanks(const proto::StepPlan& plan);
  void EndPrompts(MicroBatch& batch, bool went_well);
  void ExpectAnswers(MicroBatch& batch, int op);
  bool Gathers(const MicroBatch& batch, int op) const;
  void AskForRows(MicroBatch& batch, int op, std::vector<Action>& actions) const;
  bool AwaitsPieces(const MicroBatch& batch, int op) const;
  bool AttendsHere(const MicroBatch& batch, int op) const;
  bool AwaitsWhatItAttends(const MicroBatch& batch, int op) const;
  bool AwaitsRank(const MicroBatch& batch, int op) const;
  absl::Status CheckExchange(const proto::StepPlan& plan, const proto::StepEntry& entry) const;
  int64_t RankStateBytes(int op) const;
  int64_t RankRowsBytes(const proto::StepPlan& plan, int op, int rank) const;
  proto::TokenRange RowsBetween(const proto::StepPlan& plan, int op, int from, int to) const;
  static bool FromRanks(const MicroBatch& batch);
  static bool GivesBack(const proto::StepPlan& plan);
  void BeginKeeping(MicroBatch& batch);
  void StopKeeping(SequenceId sequence);
  bool IsOfLaterRank(const MicroBatch& batch, StepId step, int rank) const;
  bool TakeFromLaterRank(MicroBatch& batch, int op, int rank, RankTensor rows, std::vector<Action>& actions);
  Position EndOfKept(const MicroBatch& batch) const;
  bool IsAhead(const MicroBatch& batch) const;
  bool MayFinish(const MicroBatch& batch) const;
  void BeginRanks(MicroBatch& batch, std::vector<Action>& actions);
  void SendToRanks(MicroBatch& batch, int op, std::vector<Action>& actions);
  void AttendedToRanks(MicroBatch& batch, int op, std::vector<Action>& actions);
  void PassOver(const MicroBatch& batch, int op, int rank, std::vector<Action>& actions);
  static bool Rings(const proto::StepPlan& plan);
  PromptEntry BeginPromptOfRing(const proto::StepPlan& plan);
  uint32_t ShardsTo(const proto::StepPlan& plan, int op, int rank) const;
  void BeginRing(MicroBatch& batch, int op, std::vector<Action>& actions);
  void SendShards(MicroBatch& batch, std::vector<Action>& actions);
  void TendRing(MicroBatch& batch, std::vector<Action>& actions);
  int ShardToAttend(const MicroBatch& batch) const;
  bool RingIsDone(const MicroBatch& batch) const;
  static bool TakeFromRing(MicroBatch& batch, const RankAttended& event);
  static bool Switches(const proto::StepPlan& plan);
  static bool SwitchesStates(const proto::StepPlan& plan);
  void ChainStates(proto::StepPlan& plan) const;
  bool Switches(const proto::StepPlan& plan, int op) const;
  bool AwaitsStates(const MicroBatch& batch, int op) const;
  int64_t HeadsBytesFrom(const proto::StepPlan& plan, int op, int rank) const;
  proto::SwitchRank SwitchRankOf(const proto::StepPlan& plan) const;
  static PromptEntry BeginPromptOfSwitch(const proto::StepPlan& plan);
  bool FitsSwitch(const proto::StepPlan& plan, int op, int rank, size_t bytes) const;
  void BeginSwitch(MicroBatch& batch, int op, std::vector<Action>& actions);
  void SendHeads(MicroBatch& batch, std::vector<Action>& actions);
  int HeadsToAttend(const MicroBatch& batch) const;
  bool AttendsNextHeads(MicroBatch& batch, std::vector<Action>& actions) const;
  void AttendedHeads(MicroBatch& batch, int rank, std::vector<Action>& actions);
  bool SwitchIsDone(const MicroBatch& batch) const;
  int64_t SwitchBytesOf(const MicroBatch& batch) const;
  static bool AsksRanks(const proto::StepPlan& plan);
  static PromptEntry BeginPromptOfPassQ(const proto::StepPlan& plan);
  bool FitsQueries(const proto::StepPlan& plan, int op, int rank, size_t bytes) const;
  uint32_t Askers(const proto::StepPlan& plan, int op) const;
  uint32_t Holders(const proto::StepPlan& plan, int op) const;
  void SendQueries(MicroBatch& batch, int op, std::vector<Action>& actions) const;
  void BeginPassQ(MicroBatch& batch, int op);
  bool AnswerQueries(MicroBatch& batch, std::vector<Action>& actions) const;
  bool AnsweredQueries(MicroBatch& batch, std::vector<Action>& actions);
  void DropAnswered(MicroBatch& batch) const;
  bool HasQueries(const MicroBatch& batch, int& op, int& rank) const;
  bool PassQIsDone(const MicroBatch& batch) const;
  int64_t OutputBytesOf(const MicroBatch& batch, int op, int rank) const;
  int64_t PassQBytesOf(const MicroBatch& batch) const;
  bool MayAdvance(const MicroBatch& batch) const;
  void GoOnWithRanks(MicroBatch& batch, int op, std::vector<Action>& actions);
  bool MayHoldKeyValues(const MicroBatch& batch) const;
  int64_t AnswerBytes(const MicroBatch& batch, const WorkerPart& part, int op) const;
  proto::PrefixTraffic PrefixTrafficOf(const MicroBatch& batch) const;
  proto::PromptWork PromptWorkOf(const MicroBatch& batch) const;
  bool MayGoOn(const MicroBatch& batch) const;
  bool TakeAnswer(MicroBatch& batch, const PartialArrived& event);
  void SendHeldKeyValues(MicroBatchId id, std::vector<Action>& actions);
  void Advance(MicroBatchId id, std::vector<Action>& actions);
  int ExpectPartials(MicroBatch& batch, int op);
  void EndInOrder(MicroBatch& batch, proto::StepResult result, std::vector<Action>& actions);
  void FailFollower(MicroBatchId of, std::vector<Action>& actions);
  void Finish(MicroBatch& batch, proto::StepResult result, std::vector<Action>& actions);
  MicroBatch* Running(MicroBatchId id, StepId step);

  const proto::AttentionTable table_;
  const StepProgram program_;
  const ComputeWorkerOptions options_;
  std::vector<AttentionWorkerAddress> workers_;
  std::vector<MicroBatch> micro_batches_;
  PromptScratch scratch_;
  StateSlots state_slots_;
  RankInbox inbox_;
  std::optional<proto::StepPlan> waiting_;  // for what the step before it draws
  MicroBatchId last_begun_, waits_for_;     // waiting_ waits for the second, whatever has begun since
  ComputeWorkerCounters counters_;
};

}  // namespace dovetail::compute
