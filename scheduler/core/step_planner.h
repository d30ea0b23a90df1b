#pragma once
#include <cstdint>
#include <vector>

#include "scheduler/core/chunk_room.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/growth.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/prefill_groups.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/step_writer.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// What is in a step: a token of every running sequence, then as much of the prompts as the budget leaves, in equal
// parts for tenants.
// Threads: thread-compatible; deterministic.
class StepPlanner {
 public:
  // All outlive this.
  StepPlanner(const SchedulerOptions& options, const ComputePool& pool, MicroBatches& batches,
              const KvAccounts& accounts, const ChunkRoom& room, StepWriter& writer, PrefillGroups& groups,
              Growth& growth, Turn& turn)
      : options_(options),
        pool_(pool),
        batches_(batches),
        accounts_(accounts),
        room_(room),
        writer_(writer),
        groups_(groups),
        growth_(growth),
        turn_(turn) {}

  // Plans a step for every micro-batch that may have one.
  // requests_wait: for a place.
  void Plan(bool requests_wait);

  uint64_t shortened_chunks() const { return shortened_chunks_; }  // of steps

 private:
  // What prompts may take of the step that is being planned.
  struct Chunks {
    double room_s = 0;  // of what is left, by --prefill-itl-budget; infinity: there is no bound
    double part_s = 0;  // of that, for the tenant at hand
    bool any = false;   // one has a part
    bool shortened = false;
  };

  void PartTiers();
  void SendToPairs();
  bool IsOnePair() const;
  bool MayRunAhead(int index) const;
  bool RunsAhead(int first, int second) const;
  bool MayBeFollowed(const MicroBatch& flight, int home) const;
  void PlanAhead(int first, int second);
  bool PlanStep(int index, int slot, const MicroBatch* after);
  void WriteEntries(MicroBatch& flight, proto::StepPlan& plan);
  bool LongestWaitsForRoom(const MicroBatch& batch) const;
  void ChooseDecodes(MicroBatch& batch, const MicroBatch* after, int& budget);  // `after`: as PlanStep
  void ChoosePrefills(MicroBatch& batch, int& budget);
  void GivePrefill(Sequence& sequence, int most, int& budget);
  Position Shortened(const Sequence& sequence, Position most);
  double SecondsOf(const Sequence& sequence, Position tokens) const;
  bool IsOnPlane(const Sequence& sequence) const;
  PrefillForecast Predicted(const Sequence& sequence, Position ctx_len, WorkerId compute_worker, int tokens) const;
  PrefillForecast ForecastOf(Sequence& sequence, Position ctx_len, WorkerId compute_worker) const;

  const SchedulerOptions& options_;
  const ComputePool& pool_;
  MicroBatches& batches_;
  const KvAccounts& accounts_;
  const ChunkRoom& room_;
  StepWriter& writer_;
  PrefillGroups& groups_;
  Growth& growth_;
  Turn& turn_;
  std::vector<Sequence*> scratch_, chosen_, followed_;  // kept for their capacity
  std::vector<int> idle_;
  bool had_pairs_ = false;  // when steps were planned last
  Chunks chunks_;
  uint64_t shortened_chunks_ = 0;
};

}  // namespace dovetail::scheduler
