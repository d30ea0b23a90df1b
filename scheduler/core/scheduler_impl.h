#pragma once
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
#include "scheduler/core/block_names.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/grammar_pauses.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/prefill_groups.h"
#include "scheduler/core/probes.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/request_checks.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/step_writer.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/turn.h"

// The parts of SchedulerCore. Each event changes the records, then Pump() admits who may start and plans a step for
// every idle micro-batch. Files: requests.cc (arrival, ends), incarnation.cc (open, fork, release, preempt),
// admission.cc (who may start, where), loss.cc (workers that go), planning.cc (what is in a step), results.cc (what
// came of it), prefill_groups.cc (prompts that several compute workers prefill together).

namespace dovetail::scheduler {

class SchedulerCore::Impl {
 public:
  Impl(const SchedulerOptions& options, uint64_t seed);

  void Handle(const Event& event, absl::Time now, std::vector<Action>& actions);
  absl::Time NextDeadline() const;
  SchedulerStats stats() const;
  bool HoldsNothing(WorkerId worker) const;
  Position LongestSequence() const { return placer_.LongestSequence(); }

 private:
  // requests.cc
  void On(const RequestArrived& event);
  void On(const RequestCancelled& event);
  void On(const ChoiceStopped& event);
  void On(const RequestPaused& event);
  void On(const RequestResumed& event);
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
  void ExpireMoves();

  // incarnation.cc
  void Open(Sequence& sequence, proto::Placement placement);
  void RefusedToOpen(Sequence& sequence);
  void StartOpened(Sequence& sequence);
  void MakeReady(Sequence& sequence);
  void Fork(Sequence& parent);
  bool ForkOne(Sequence& parent, Sequence& child);
  void FinishForks(RequestState& request);
  void Release(Sequence& sequence);  // ends the incarnation; no step in flight contains it
  void Preempt(Sequence& sequence);
  void Wait(Sequence& sequence);  // to its tenant's queue

  // admission.cc
  void On(const PrefixProbed& event);
  void Admit();
  bool AdmitOne(Sequence& sequence);
  bool FreeSlots(const Tenant& tenant, int needed);
  bool FreeBlocksFor(const Sequence& sequence, PlacementPolicy policy);
  bool PreemptPaused(std::optional<int> worker);
  absl::Status TooLarge(const Sequence& sequence) const;
  void GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by);
  void PlaceProbed(Sequence& sequence);
  void ExpireProbes();

  // planning.cc
  void On(const ComputeWorkerJoined& event);
  void Plan();
  bool RunsAhead() const;
  void PlanAhead();
  bool PlanStep(int index, int slot, const MicroBatch* after);
  bool MayFollow(const MicroBatch& batch) const;
  bool MayGoAhead(const Sequence& sequence) const;
  bool GrowAhead(Sequence& sequence);
  void ChooseDecodes(MicroBatch& batch, bool ahead, int& budget);
  void ChoosePrefills(MicroBatch& batch, int& budget);
  void GivePrefill(Sequence& sequence, int most, int& budget);
  bool LongestWaitsForRoom(const MicroBatch& batch) const;
  bool Grow(Sequence& sequence, Position end);  // false: not now; the sequence may have been preempted or ended
  void OutgrewItsWorker(Sequence& sequence, Position end);

  // results.cc
  void On(const StepFinished& event);
  void On(const StepUnreadable& event);
  void On(const Tick&);
  void EndGroup(const std::optional<PrefillGroups::Ended>& group);
  void FinishStep(MicroBatch& batch, const proto::StepResult& result);
  void AwaitGrammars(MicroBatch& batch, const proto::StepResult& result);
  void LoseSequences(const MicroBatch& follower);
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
  void TryElsewhere(MicroBatch& batch, const std::string& error);
  void Settle(Sequence& sequence);  // after its step returned: carries out what had to wait

  void Pump();

  const SchedulerOptions options_;
  Turn turn_;
  ComputePool pool_;
  MicroBatches batches_;
  KvAccounts accounts_;
  KvBudget& budget_;  // that of accounts_
  BlockNames names_;
  StepWriter writer_;
  PrefillGroups groups_;
  Placer placer_;
  Slots slots_;
  Probes probes_;
  Moves moves_;
  ReplacementWait stranded_;
  GrammarPauses grammar_pauses_;
  TenantQueues queues_;
  absl::flat_hash_map<RequestId, std::unique_ptr<RequestState>> requests_;  // looked up, never iterated
  absl::flat_hash_map<SequenceId, Sequence*> incarnations_;                 // looked up, never iterated
  bool rebalance_ = false;           // a worker joined: others may have much more to do than it
  std::map<uint64_t, Call> calls_;   // by GenerationRequest::call
  std::vector<RequestId> finished_;  // to be forgotten when this event is done
  std::vector<Sequence*> scratch_, chosen_;
  std::vector<int> idle_scratch_;
  std::optional<proto::StepResult> failed_;  // of a step whose follower is still in flight
  int waiting_ = 0;                          // sequences in Phase::kWaiting
  int paused_ = 0;
  bool admission_held_ = false;  // a worker ran out of memory: no newcomers until a step went well
  uint64_t releases_ = 0;        // incarnations that ended
  uint64_t next_ordinal_ = 0;
  uint64_t next_sequence_ = 1;
  SchedulerStats stats_;
};

}  // namespace dovetail::scheduler
