#pragma once
#include <cstdint>
#include <string>

#include "scheduler/core/admission.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/grammar_pauses.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// What is done about steps that failed. Nothing of them was committed: their entries are as before the step. What can
// be helped by trying again is planned again; what cannot ends requests.
// Threads: thread-compatible; deterministic. A step is over for its micro-batch when one of these returns.
class StepFailures {
 public:
  // All outlive this.
  StepFailures(MicroBatches& batches, const KvAccounts& accounts, const Slots& slots, const Placer& placer,
               const ReplacementWait& stranded, GrammarPauses& grammar_pauses, Choices& choices, Admission& admission,
               Turn& turn)
      : batches_(batches),
        accounts_(accounts),
        slots_(slots),
        placer_(placer),
        stranded_(stranded),
        grammar_pauses_(grammar_pauses),
        choices_(choices),
        admission_(admission),
        turn_(turn) {}

  // The step is planned again.
  void Repeat(MicroBatch& batch);
  // The compute worker failed, not the step, with which nothing is known to be wrong: it is repeated, by another worker
  // if there is one. After kStepAttempts its requests end.
  void TryElsewhere(MicroBatch& batch, const std::string& error);
  void Fail(MicroBatch& batch, const std::string& error);  // its requests end
  // Another sequence gives way to it: on an attention worker, or on the compute worker, where the end of any may help.
  void OutOfMemory(MicroBatch& batch, const proto::StepResult& result);
  // The compute worker lost an attention worker. Steps and news of losses travel on different connections, so this may
  // come first: until the loss is known here, or kUnreachablePatience is over, the micro-batch waits and tries again.
  void Unreachable(MicroBatch& batch, const proto::StepResult& result);
  // What lies on an attention worker is not what was written there: those sequences begin again from the token log, on
  // another worker if one can hold them. Where that does not help, their requests end.
  void RestartDamaged(MicroBatch& batch, const proto::StepResult& result);
  // Grammars of some sequences are still compiled: the others go on, and those are asked for again after a pause.
  void AwaitGrammars(MicroBatch& batch, const proto::StepResult& result);
  // The step before this one is to be repeated, which attention workers that have gone on to this one would refuse: its
  // sequences begin again, and nothing of them is kept there.
  static void LoseSequences(const MicroBatch& follower);

  // A sequence of the step lies on that worker as it was before it was lost.
  bool NamesLost(const MicroBatch& batch, WorkerId worker) const;
  uint64_t damaged() const { return damaged_; }  // sequences that began again for that

 private:
  void HasNoRoomAlone(Sequence& sequence, const WorkerId* worker, const std::string& error);
  bool Names(const Sequence& sequence, WorkerId worker, bool current) const;
  const KvBudget& budget() const { return accounts_.budget(); }

  MicroBatches& batches_;
  const KvAccounts& accounts_;
  const Slots& slots_;
  const Placer& placer_;
  const ReplacementWait& stranded_;
  GrammarPauses& grammar_pauses_;
  Choices& choices_;
  Admission& admission_;
  Turn& turn_;
  uint64_t damaged_ = 0;
};

}  // namespace dovetail::scheduler
