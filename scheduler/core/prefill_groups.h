#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "proto/prefill_part.h"
#include "proto/step_plan.h"
#include "scheduler/core/chunk_room.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/step_writer.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Long prompts that several compute workers prefill together (proto::PrefillPart): one step of one sequence, with a
// step for each rank. It is committed as a whole, or repeated as a whole. A rank's step has a micro-batch that is not
// in use for ordinary steps.
// Threads: thread-compatible; deterministic.
class PrefillGroups {
 public:
  // All outlive this.
  PrefillGroups(const SchedulerOptions& options, ComputePool& pool, MicroBatches& batches, KvAccounts& accounts,
                const ChunkRoom& room, StepWriter& writer, Turn& turn)
      : options_(options),
        pool_(pool),
        batches_(batches),
        accounts_(accounts),
        room_(room),
        writer_(writer),
        turn_(turn) {}

  // Begins groups for long prompts that wait: they share the compute workers that are in no group, of which all ranks
  // of a group are of one kind: ranks hand each other layers' inputs in forms that differ between CPUs and GPUs. Where
  // ranks are the planner's to choose, none begins while requests wait for a place: those are served sooner by workers
  // of their own.
  void Plan(bool requests_wait);

  // A group of which no rank is in flight any more. From here on it is one step with all of its tokens, in `batch`.
  struct Ended {
    enum class Outcome : uint8_t {
      kFinished,      // `result` is the step's
      kRepeat,        // its tokens are planned again
      kTryElsewhere,  // a compute worker gave no result in time, as `error` says
    };
    Outcome outcome = Outcome::kRepeat;
    MicroBatch* batch = nullptr;
    proto::StepResult result;
    std::string error;
  };
  // The result of a rank's step came. Returns the group if it has ended with that.
  std::optional<Ended> Finish(MicroBatch& rank, const proto::StepResult& result);
  // The rank's compute worker was lost. overdue: why, if that is because it gave no result in time; else empty.
  std::optional<Ended> Lose(MicroBatch& rank, const std::string& overdue);
  // The rank is overdue. Where all ranks of its group wait for each other, any of them may be at fault: all are
  // withdrawn, and the one that does not end then is. False: this rank is, for its group is another one, or has been
  // withdrawn.
  bool WithdrawOverdue(const MicroBatch& rank);
  // The compute worker was lost. Groups in flight of which it had ended a rank end too, if ranks give each other what
  // they need: it may not have sent all of that.
  void LoseEndedRanks(WorkerId worker);
  // The two reach each other no more. Groups of which both are ranks end, if ranks give each other what they need.
  void LoseLink(WorkerId one, WorkerId other);
  // The sequence's choice is over: what its group computes is not wanted any more. Its ranks end all the same.
  void Withdraw(const Sequence& sequence);

  uint64_t groups() const { return groups_; }        // that began
  uint64_t tokens() const { return tokens_; }        // in them
  uint64_t shortened() const { return shortened_; }  // that have less of a prompt for the sake of streams

 private:
  struct Run {  // a group in flight
    StepId id;
    Sequence* sequence = nullptr;
    std::vector<int> slots;  // micro-batches, by rank
    PrefillForecast forecast;
    double streams_s = 0;  // of its time
    bool shortened = false;
    absl::Time begun;
    std::map<StepId, proto::StepResult> results;
    StepId failed;           // the rank that failed first
    bool direct = false;     // ranks exchange with each other
    bool barrier = false;    // and each waits for all others
    bool withdrawn = false;  // nothing will come of it: it ends when all ranks have
    bool lost = false;       // with a compute worker
    std::string overdue;     // not empty: a rank gave no result in time
  };

  std::vector<Sequence*> LongPrompts() const;
  std::vector<WorkerId> FreeRanks() const;
  std::vector<int> FreeSlots() const;
  PrefillChoice Choose(PromptToPlan prompt, const std::vector<FreeRank>& free, int most_ranks, bool& shortened) const;
  std::vector<WorkerId> PlanGroup(Sequence& sequence, const std::vector<WorkerId>& workers, int most_ranks,
                                  const std::vector<int>& slots);
  void PlanRank(Sequence& sequence, const proto::PrefillPart& part, const proto::TokenRange& tokens,
                const proto::RankAddress& address, const std::vector<proto::RankAddress>& ranks,
                const PrefillChoice& choice);
  void LearnFrom(const Run& run, const MicroBatch& rank, const proto::StepResult& result);
  Run& RunOf(const MicroBatch& rank);
  void Withdraw(Run& run);
  MicroBatch* FirstInFlight(const Run& run);  // the lowest rank; null: all have ended
  std::optional<Ended> EndIfDone(const Run& run);
  Ended End(Run& run);
  proto::StepResult Merged(const Run& run) const;

  const SchedulerOptions& options_;
  ComputePool& pool_;
  MicroBatches& batches_;
  KvAccounts& accounts_;
  const ChunkRoom& room_;
  StepWriter& writer_;
  Turn& turn_;
  std::vector<Run> runs_;
  uint64_t groups_ = 0;
  uint64_t tokens_ = 0;
  uint64_t shortened_ = 0;
};

}  // namespace dovetail::scheduler
