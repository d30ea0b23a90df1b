#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/rotation.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/step_patience.h"
#include "scheduler/core/tenant_queues.h"

// The parts of SchedulerCore. Each event changes the records, then Pump() admits who may start and plans a step for
// every idle micro-batch. Files: requests.cc (arrival, ends), incarnation.cc (open, fork, release, preempt),
// admission.cc (who may start, where), loss.cc (workers that go), planning.cc (what is in a step), results.cc (what
// came of it), prefill_groups.cc (prompts that several compute workers prefill together).

namespace dovetail::scheduler {

// One entry of a step in flight.
struct PlannedEntry {
  Sequence* sequence = nullptr;
  SequenceId id;
  Position ctx_len = 0;
  int q_len = 0;
  int logits_rows = 0;
  bool sample = false;
  bool group = false;       // taken by a prefill group
  bool may_follow = false;  // what it draws stays on the worker and is all that the next step needs
};

// A set of ready sequences that step together, and a step in flight: at most one of the set, or of the set of `home`,
// whose next step then is in flight already.
struct MicroBatch {
  std::vector<Sequence*> members;  // by age
  std::vector<PlannedEntry> entries;
  bool in_flight = false;
  bool held = false;               // out of memory with nobody to preempt: not planned until another step finished
  int out_of_memory_in_a_row = 0;  // with nobody left to preempt
  absl::Time not_before = absl::InfinitePast();           // not planned until then, or until a worker is lost
  absl::Time unreachable_since = absl::InfiniteFuture();  // its steps end for a worker that is well as far as we know
  bool unreadable = false;                                // the result of the step in flight
  int failed_attempts = 0;                                // kStepAttempts, in a row
  bool prefill_only_last = false;                         // without chunking: the last step left decodes out
  StepId step;
  StepId follows;       // the step in flight follows that one
  int home = 0;         // whose members are in it
  StepId group;         // of a prefill group, until that has ended: it is a rank, and has no members
  bool voided = false;  // the step that it follows failed
  WorkerId compute_worker;
  absl::Time sent, deadline;  // of the step in flight
  double work = 0;            // StepPatience::WorkOf

  // A worker that its steps end for is known to be lost, or its members have gone.
  void EndWait() {
    not_before = absl::InfinitePast();
    unreachable_since = absl::InfiniteFuture();
  }
  // What it suffered was its members': others begin without it.
  void ForgetMembersTroubles() {
    EndWait();
    held = false;
    out_of_memory_in_a_row = failed_attempts = 0;
  }
};

class SchedulerCore::Impl {
 public:
  Impl(const SchedulerOptions& options, uint64_t seed);

  void Handle(const Event& event, absl::Time now, std::vector<Action>& actions);
  absl::Time NextDeadline() const;
  SchedulerStats stats() const;
  bool HoldsNothing(WorkerId worker) const;
  Position LongestSequence() const;

 private:
  // requests.cc
  void On(const RequestArrived& event);
  void On(const RequestCancelled& event);
  void On(const ChoiceStopped& event);
  void On(const RequestPaused& event);
  void On(const RequestResumed& event);
  absl::Status CheckRequest(const GenerationRequest& request) const;
  absl::Status CheckLists(const GenerationRequest& request) const;
  absl::Status QueueFull(const std::string& tenant) const;
  absl::Status PushedOut() const;
  bool MakeRoomInQueue(const std::string& tenant);
  void Refuse(const GenerationRequest& request, const absl::Status& status);
  RequestState* Find(RequestId id);
  GenerationUpdate UpdateFor(const Sequence& sequence) const;
  void EndChoice(Sequence& sequence, FinishReason reason, const absl::Status& status = absl::OkStatus());
  void EndChoice(Sequence& sequence, GenerationUpdate&& update);  // `update` says reason and error
  void EndRequest(RequestState& request, FinishReason reason, const absl::Status& status);
  void LetNextChoiceLead(RequestState& request);
  void ForgetFinished();

  // incarnation.cc
  void On(const AttentionWorkerJoined& event);
  void On(const SequenceOpened& event);

  // loss.cc
  void On(const AttentionWorkerLost& event);
  void On(const AttentionWorkerDraining& event);
  void On(const ComputeWorkerLost& event);
  void LoseSteps(WorkerId compute_worker);
  void RestartSequencesOn(WorkerId worker, std::optional<Epoch> but_not_of);
  void EndProbesOf(int worker);
  void NoteLoss();
  bool MayFitAgain(Position tokens) const;  // once a lost worker is replaced
  void Strand(Sequence& sequence);
  void EndStranding();
  void ExpireStranded();
  void ForgetLostWorkers();
  bool NamedByAnyone(WorkerId worker) const;
  void RepeatStep(MicroBatch& batch);

  // moving.cc
  void On(const SequenceMoved& event);
  void StartMoves();
  void LeaveDrainingWorkers();
  void Rebalance();
  bool MayMove(const Sequence& sequence) const;
  bool MoveAway(Sequence& sequence, int from, int to);
  Charges WhileMoving(const Sequence& sequence, int from, const Charges& after) const;
  void OpenedByTaker(Sequence& sequence);
  void FinishMove(Sequence& sequence);
  void EndMove(Sequence& sequence);
  void ReleaseAtTaker(const Sequence& sequence);
  void ForgetMovesTo(WorkerId worker, std::optional<Epoch> but_not_of);
  void ExpireMoves();
  std::optional<uint16_t> FreeMoveSlot() const;
  std::vector<int> TakersOf(const Sequence& sequence) const;

  // incarnation.cc
  void TakeSlot(Sequence& sequence);
  void GiveBackSlot(Sequence& sequence);
  void DropPromises(RequestState& request);
  void Charge(Sequence& sequence, const Charges& cost);
  void ChargeShared(RequestState& request, const Charges& cost);
  void Open(Sequence& sequence, proto::Placement placement);
  void RefusedToOpen(Sequence& sequence);
  void StartOpened(Sequence& sequence);
  void MakeReady(Sequence& sequence);
  void Enlist(Sequence& sequence, int micro_batch);
  int SmallestFor(const Sequence& sequence) const;
  bool MayStepIn(const Sequence& sequence, int micro_batch) const;
  void Fork(Sequence& parent);
  bool ForkOne(Sequence& parent, Sequence& child);
  void FinishForks(RequestState& request);
  void Release(Sequence& sequence);  // ends the incarnation; no step in flight contains it
  void Preempt(Sequence& sequence);
  void Wait(Sequence& sequence);  // to its tenant's queue
  bool MayLookUp(const Sequence& sequence) const;
  uint32_t UsableHashes(const Sequence& sequence) const;
  const proto::BlockHash& HashOf(Sequence& sequence, int64_t block);
  void AppendHashes(Sequence& sequence, int64_t first, int64_t end, std::vector<proto::BlockHash>& out);

  // admission.cc
  void On(const PrefixProbed& event);
  void Admit();
  bool AdmitOne(Sequence& sequence);
  bool FreeSlots(const Tenant& tenant, int needed);
  bool FreeBlocksFor(const Sequence& sequence, PlacementPolicy policy);
  bool PreemptPaused(std::optional<int> worker);
  absl::Status TooLarge(const Sequence& sequence) const;
  void GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by);
  Refusal* RefusalBy(Sequence& sequence, WorkerId worker) const;
  const Refusal* FindRefusal(const Sequence& sequence, int worker) const;
  bool HasNoRoomFor(const Sequence& sequence, int worker) const;
  bool Refuses(const Sequence& sequence, int worker) const;
  std::vector<KvBudget::Worker> NotRefusing(const Sequence& sequence) const;
  std::optional<int> LacksRoomOn(const Sequence& sequence, const proto::Placement& placement) const;
  std::optional<int> OnlyAttentionWorker(const Sequence& sequence) const;
  std::vector<proto::Placement> Candidates(const Sequence& sequence, PlacementPolicy policy,
                                           const std::vector<KvBudget::Worker>& workers) const;
  std::optional<proto::Placement> Place(const Sequence& sequence, PlacementPolicy policy) const;
  bool WantsProbe(const Sequence& sequence, PlacementPolicy policy) const;
  void Probe(Sequence& sequence);
  void PlaceProbed(Sequence& sequence);
  void EndProbe(Sequence& sequence);
  void ExpireProbes();
  std::vector<proto::Placement> PlacementsOf(PlacementPolicy policy, Position most_tokens,
                                             const std::vector<uint32_t>& hits,
                                             const std::vector<KvBudget::Worker>& workers) const;
  std::vector<proto::Placement> Possible(const Sequence& sequence, PlacementPolicy policy) const;
  std::vector<proto::Placement> ThatHold(std::vector<proto::Placement> candidates, Position tokens) const;
  bool FitsNowhere(Position tokens) const;
  std::optional<PlacementPolicy> PolicyThatFits(const Sequence& sequence, std::vector<KvBudget::Worker> workers) const;
  std::optional<PlacementPolicy> NextPolicy(const Sequence& sequence) const;  // nothing: it cannot fit, ever
  Position MostTokens(const Sequence& sequence) const;

  // planning.cc
  void On(const ComputeWorkerJoined& event);
  void Plan();
  int micro_batches_in_use() const;
  void EmptyUnused();
  void NoteTimes(const MicroBatch& batch, const proto::StepTimings& timings);
  bool RunsAhead() const;
  void PlanAhead();
  bool PlanStep(int index, int slot, const MicroBatch* after);
  bool MayFollow(const MicroBatch& batch) const;
  bool MayGoAhead(const Sequence& sequence) const;
  bool GrowAhead(Sequence& sequence);
  void Balance(int index);
  void SendHome(int index);
  void Leave(Sequence& sequence);
  void ChooseDecodes(MicroBatch& batch, bool ahead, int& budget);
  void ChoosePrefills(MicroBatch& batch, int& budget);
  void GivePrefill(Sequence& sequence, int most, int& budget);
  bool LongestWaitsForRoom(const MicroBatch& batch) const;
  bool IsRunnable(const Sequence& sequence) const;
  bool Grow(Sequence& sequence, Position end);  // false: not now; the sequence may have been preempted or ended
  Sequence* PickVictim(std::optional<int> worker, absl::FunctionRef<bool(const Tenant&)> allowed) const;
  bool HoldsOn(const Sequence& sequence, int worker) const;
  void OutgrewItsWorker(Sequence& sequence, Position end);
  const Sequence* Oldest() const;
  bool IsEvictable(const Sequence& sequence) const;
  // Where the new tokens of a step begin, and up to where blocks are named in it.
  struct Chunk {
    Position ctx_len = 0;
    Position named_until = 0;
    bool ahead = false;  // the token is being drawn
  };
  void FillEntry(Sequence& sequence, const Chunk& chunk, WorkerId compute_worker, proto::StepEntry& entry,
                 PlannedEntry& planned);
  size_t BytesToGive(const Sequence& sequence, WorkerId compute_worker) const;
  bool MayGive(const Sequence& sequence);
  void FillSampling(Sequence& sequence, bool ahead, WorkerId compute_worker, proto::StepEntry& entry);

  // prefill_groups.cc
  struct PrefillRun {  // a prefill group in flight
    StepId id;
    Sequence* sequence = nullptr;
    std::vector<int> slots;  // micro-batches, by rank
    std::map<StepId, proto::StepResult> results;
    StepId failed;           // the rank that failed first
    bool withdrawn = false;  // nothing will come of it: it ends when all ranks have
    bool lost = false;       // with a compute worker
    std::string overdue;     // not empty: a rank gave no result in time
  };
  int MostPrefillRanks() const;
  std::vector<WorkerId> FreeRanks() const;
  std::vector<int> FreeGroupSlots() const;
  bool IsLongPrompt(const Sequence& sequence) const;
  void PlanPrefillGroups();
  int PlanGroup(Sequence& sequence, absl::Span<const WorkerId> workers, const std::vector<int>& slots);
  void PlanRank(Sequence& sequence, const proto::PrefillPart& part, const proto::TokenRange& tokens, WorkerId worker,
                int slot);
  PrefillRun& RunOf(const MicroBatch& rank);
  void WithdrawGroup(PrefillRun& run);
  void WithdrawGroupOf(const Sequence& sequence);
  void FinishRank(MicroBatch& rank, const proto::StepResult& result);
  void LoseRank(MicroBatch& rank, const std::string& overdue);
  MicroBatch* FirstInFlight(const PrefillRun& run);  // the lowest rank; null: all have ended
  void EndGroupIfDone(const PrefillRun& run);
  void EndGroup(PrefillRun& run);
  bool ChargeGroup(Sequence& sequence, int tokens);
  void EndChargeOfGroup(Sequence& sequence);
  proto::StepResult MergeResults(const PrefillRun& run) const;

  // results.cc
  void On(const StepFinished& event);
  void On(const StepUnreadable& event);
  void On(const Tick&);
  MicroBatch* InFlight(MicroBatchId id, StepId step, WorkerId compute_worker);
  void FinishStep(MicroBatch& batch, const proto::StepResult& result);
  void AwaitGrammars(MicroBatch& batch, const proto::StepResult& result);
  void NoteGrammarPauses();
  MicroBatch* FollowerOf(const MicroBatch& batch);
  MicroBatch* FollowedBy(const MicroBatch& batch);
  void LoseSequences(const MicroBatch& follower);
  MicroBatch& HomeOf(const MicroBatch& batch) { return micro_batches_[batch.home]; }
  void Commit(const PlannedEntry& entry, const proto::EntryResult& result);
  void TakePromptOutputs(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate& update);
  void TakeToken(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate&& update);
  void OutOfMemory(MicroBatch& batch, const proto::StepResult& result);
  void HasNoRoomAlone(Sequence& sequence, const WorkerId* worker, const std::string& error);
  void Unreachable(MicroBatch& batch, const proto::StepResult& result);
  void RestartDamaged(MicroBatch& batch, const proto::StepResult& result);
  bool Names(const Sequence& sequence, WorkerId worker, bool current) const;  // in a shard of a current epoch, or not
  bool NamesLost(const MicroBatch& batch, WorkerId worker) const;
  void Fail(MicroBatch& batch, const std::string& error);
  void SetDeadline(MicroBatch& flight, double work);
  bool Overdue(const MicroBatch& batch) const { return batch.in_flight && batch.deadline <= now_; }
  void TryElsewhere(MicroBatch& batch, const std::string& error);
  void Settle(Sequence& sequence);  // after its step returned: carries out what had to wait

  template <typename A>
  void Act(A&& action) {
    static_assert(!std::is_lvalue_reference_v<A>, "actions are given away");
    actions_->emplace_back(std::in_place_type<A>, std::move(action));
  }
  // By reference all the way: an update is large, and there is one per sequence and step.
  void Emit(GenerationUpdate&& update) { actions_->emplace_back(std::in_place_type<EmitUpdate>, std::move(update)); }
  void Pump();
  int slots_used() const { return static_cast<int>(active_.size()) + reserved_slots_; }

  const SchedulerOptions options_;
  KvBudget budget_;
  TenantQueues queues_;
  absl::flat_hash_map<RequestId, std::unique_ptr<RequestState>> requests_;  // looked up, never iterated
  absl::flat_hash_map<SequenceId, Sequence*> incarnations_;                 // looked up, never iterated
  absl::flat_hash_map<uint64_t, Sequence*> probes_;                         // by pin id; looked up, never iterated
  std::vector<Sequence*> active_;  // all that hold a slot, in the order of admission
  std::deque<Sequence*> probing_;  // by deadline
  std::vector<Sequence*> moving_;  // at most proto::kMoveSlots, by deadline
  std::vector<Sequence*>
      stranded_;  // kWaiting, but in no queue: no attention worker is large enough since one was lost
  absl::Time lost_at_ = absl::InfinitePast();  // when an attention worker was last lost, or began to drain
  Position longest_before_loss_ = 0;           // LongestSequence(), then
  bool rebalance_ = false;                     // a worker joined: others may have much more to do than it
  std::vector<MicroBatch> micro_batches_;
  std::vector<PrefillRun> runs_;
  std::vector<WorkerId> compute_workers_;
  std::map<uint64_t, Call> calls_;   // by GenerationRequest::call
  std::vector<RequestId> finished_;  // to be forgotten when this event is done
  std::vector<Sequence*> scratch_, chosen_;
  std::vector<int> idle_scratch_;
  WorkerId planned_for_;                     // the compute worker of the step being built
  size_t given_left_ = 0;                    // bytes that may still be given in it
  bool drain_ = false;                       // no step ahead until none is in flight
  std::optional<proto::StepResult> failed_;  // of a step whose follower is still in flight
  StepPatience patience_;
  Rotation rotation_;  // micro-batches of each compute worker, with adapt_micro_batches
  int reserved_slots_ = 0;
  int waiting_ = 0;  // sequences in Phase::kWaiting
  int paused_ = 0;
  bool admission_held_ = false;  // a worker ran out of memory: no newcomers until a step went well
  uint64_t releases_ = 0;        // incarnations that ended
  uint64_t next_ordinal_ = 0;
  uint64_t next_sequence_ = 1;
  uint64_t next_pin_ = 1;
  uint64_t next_step_ = 1;
  uint64_t placement_turn_;
  SchedulerStats stats_;

  absl::Time now_;
  absl::Time next_grammar_ = absl::InfiniteFuture();  // the first of active_'s not_before to come
  std::vector<Action>* actions_ = nullptr;
};

}  // namespace dovetail::scheduler
