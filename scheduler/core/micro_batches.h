#pragma once
#include <map>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "proto/step_plan.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/prefill_forecast.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// One entry of a step in flight.
struct PlannedEntry {
  Sequence* sequence = nullptr;
  SequenceId id;
  Position ctx_len = 0;
  int q_len = 0;
  int logits_rows = 0;
  Position pool_from = 0, pool_to = 0;  // whose hidden states its result sums up; equal: of none
  bool sample = false;
  bool group = false;       // taken by a prefill group
  bool may_follow = false;  // what it draws stays on the worker and is all that the next step needs
};

// The parts of prompts in a step in flight, for --prefill-itl-budget (ADR 61). Seconds.
struct ChunkForecast {
  double predicted_s = 0;  // of all of them, with their corrections; 0: there is none, or it is not known
  double others_s = 0;     // of the parts that were under way on the compute worker when it was sent
  double streams_s = 0;    // of its time, as StreamPace has it; 0: no stream waits for it
  bool shortened = false;  // it has less than it would have without the budget
  proto::PrefillWay by;    // of the first
};

// A set of ready sequences that step together, and a step in flight: at most one of the set, or of the set of `home`,
// whose next step then is in flight already.
struct MicroBatch {
  std::vector<Sequence*> members;  // by age
  std::vector<PlannedEntry> entries;
  bool in_flight = false;
  bool held = false;               // out of memory with nothing to preempt: not planned until another step finished
  int out_of_memory_in_a_row = 0;  // with nothing left to preempt
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
  PrefillForecast forecast;   // of the one prompt in an ordinary step; no ranks: there is none, or there are several
  ChunkForecast chunk;
  bool has_prompt = false;                     // the step in flight
  bool beside_prompt = false;                  // a prompt was under way on its compute worker during the step in flight
  absl::Time finished = absl::InfinitePast();  // when the last step of its members was

  // A worker that its steps end for is known to be lost, or its members have ended.
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
  bool Overdue(absl::Time now) const { return in_flight && deadline <= now; }
  bool MayBePlanned(absl::Time now) const { return !in_flight && group == StepId() && !held && not_before <= now; }
  // The result lists exactly the step's sequences, in their order.
  bool IsAnsweredBy(const proto::StepResult& result) const;
};

// All micro-batches: which sequences are in which, which steps are in flight, and the numbers of steps.
// Threads: thread-compatible.
class MicroBatches {
 public:
  explicit MicroBatches(ComputePool& pool);  // outlives this

  MicroBatch& operator[](int index) { return batches_[static_cast<size_t>(index)]; }
  const MicroBatch& operator[](int index) const { return batches_[static_cast<size_t>(index)]; }
  int IndexOf(const MicroBatch& batch) const { return static_cast<int>(&batch - batches_.data()); }
  auto begin() { return batches_.begin(); }
  auto end() { return batches_.end(); }
  auto begin() const { return batches_.begin(); }
  auto end() const { return batches_.end(); }

  // ---- members ----

  // Into the micro-batch with the fewest members of those that it may step in.
  void Enlist(Sequence& sequence) { Enlist(sequence, SmallestFor(sequence)); }
  void Leave(Sequence& sequence);  // nothing happens if it is in none
  // Fewer are in use than were: the members of the others go on in those.
  void EmptyUnused();
  // Members that may not step in it go where they may: a compute worker joined or left, or tiers are parted.
  void SendHome(int index);
  // Sequences on a slower tier (Sequence::on_slow_tier) step in the last micro-batch of each compute worker, and the
  // others in those before it, as long as that is so.
  void PartTiers(bool apart) { pool_.PartTiers(apart); }
  // Gives members away until none in use has two fewer.
  void Balance(int index);
  size_t members() const;  // of all micro-batches

  // ---- steps ----

  // A number for one step, or for `count` in a row: the first of them. They only grow.
  StepId NextStep(uint64_t count = 1);
  StepId step_to_come() const { return StepId(next_step_); }
  // The micro-batch whose step is in flight there; null: there is none, so an answer to it is late.
  MicroBatch* InFlight(MicroBatchId id, StepId step, WorkerId compute_worker);
  MicroBatch* FollowerOf(const MicroBatch& batch);  // the step in flight that follows this one; null: none
  MicroBatch* FollowedBy(const MicroBatch& batch);  // the step in flight that this one follows; null: none
  MicroBatch& HomeOf(const MicroBatch& batch) { return batches_[static_cast<size_t>(batch.home)]; }
  bool any_in_flight() const;
  // A step is sent now; and whether that compute worker was sent none after this one.
  void NoteSent(const MicroBatch& flight) { newest_[flight.compute_worker] = flight.step; }
  bool IsNewest(const MicroBatch& flight) const { return newest_.at(flight.compute_worker) == flight.step; }
  // A step with a part of a prompt, or without one, is sent now: which steps of its compute worker wait for prompts.
  void NotePrompt(MicroBatch& flight, bool has_prompt);
  // A step of `work` (StepPatience::WorkOf) is sent now. Compute workers are taken to do their steps in turn.
  void SetDeadline(MicroBatch& flight, double work, absl::Time now);
  // When a step in flight is overdue, or a micro-batch that waits may be planned.
  absl::Time NextDeadline(absl::Time now) const;
  // Planning steps of these members before the tokens of those before are known stops until none is in flight.
  bool draining(int home) const { return draining_[static_cast<size_t>(home)]; }
  void Drain(int home) { draining_[static_cast<size_t>(home)] = true; }
  void EndDrain(int home) { draining_[static_cast<size_t>(home)] = false; }

 private:
  void Enlist(Sequence& sequence, int index);
  int SmallestFor(const Sequence& sequence) const;
  bool MayStepIn(const Sequence& sequence, int index) const;

  ComputePool& pool_;
  std::vector<MicroBatch> batches_;  // kMaxMicroBatches
  uint64_t next_step_ = 1;
  std::vector<bool> draining_;  // by micro-batch
  std::map<WorkerId, StepId> newest_;
};

}  // namespace dovetail::scheduler
