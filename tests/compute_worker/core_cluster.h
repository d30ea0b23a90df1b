#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "tests/compute_worker/step_watch.h"

namespace dovetail::compute {

// Cores of compute workers with all that is around them, made up by a seed: a scheduler that sends any plan which it
// may send, attention workers that answer, refuse, are lost and come again, devices that end what they were given or
// fail, and other ranks, which are cores themselves. What is on its way comes at any time, from ranks in any order and
// again and again. Whatever a core asks for is watched (StepWatch); what is wrong fails the current test.
//   Threads: thread-compatible
class CoreCluster {
 public:
  explicit CoreCluster(uint64_t seed);

  // One thing happens.
  void Step();
  // Nothing new begins, and what is on its way comes: every step ends, and nothing is held for it.
  void End();

  struct Counts {
    int done = 0, failed = 0, refused = 0, ahead = 0, pieces = 0, kept = 0;
    int groups[6] = {};  // that ended well, by PrefixExchange
    int again = 0;       // what came again

    Counts& operator+=(const Counts& more);
  };
  const Counts& counts() const { return counts_; }

 private:
  enum class Work { kNone, kDense, kAttend, kSample, kDrawing };
  using WorkerEpoch = std::pair<WorkerId, Epoch>;
  struct FromScheduler {
    Event event;
    bool again = false;
  };
  struct ComputeWorker {
    std::unique_ptr<ComputeWorkerCore> core;
    std::map<StepId, StepWatch> watches;               // of all steps that were planned for it
    std::set<StepId> unfinished;                       // whose plans have come
    std::vector<std::optional<StepId>> running, last;  // by micro-batch
    std::vector<Work> work;                            // likewise
    std::vector<bool> taken;                           // likewise, as the scheduler has it
    std::deque<FromScheduler> plans;
    std::deque<std::pair<AttentionWorkerAddress, bool>> members;  // that join, or are lost: false
    std::vector<RankRowsKept> keeping;
    std::set<WorkerEpoch> known, lost;
    StepId last_sent, before_last;  // the second, if the first takes its draws
  };
  // What an attention worker does for a step of a compute worker.
  struct Serving {
    bool refuses = false;
    std::deque<Event> answers, pieces;
  };
  struct ToRank {
    int worker = 0;
    StepId step;
    Event event;
  };
  struct Sequence {
    SequenceId id;
    Position ctx_len = 0;
    proto::Placement placement;
    int steps = 0;
    bool gone = false;
  };
  struct Planned {
    int worker = 0;
    std::vector<int> sequences;  // of sequences_, by entry
    StepId group;
  };
  struct Group {
    std::vector<StepId> steps;
    size_t left = 0;
    bool failed = false;
  };

  // The scheduler.
  bool Coin(int one_in) { return random_() % static_cast<uint32_t>(one_in) == 0; }
  int Of(int least, int most) { return least + static_cast<int>(random_() % static_cast<uint32_t>(most - least + 1)); }
  bool Trouble(int one_in) { return !ending_ && trouble_ > 0 && Coin(one_in * trouble_); }
  ComputeWorkerOptions SomeOptions();
  void AddComputeWorker();
  void PlanStep();
  void PlanFollower(int worker);
  void PlanGroup();
  proto::StepEntry EntryFor(int sequence, int q_len);
  int FreeSequence();
  proto::Placement SomePlacement();
  std::optional<MicroBatchId> FreeMicroBatch(int worker);
  void Send(int worker, proto::StepPlan plan, std::vector<int> sequences, bool well_formed);
  void TakeResult(const proto::StepResult& result);
  void FailGroup(Group& group);
  void EndRank(const Planned& rank, bool well);
  void Withdraw(StepId step);
  void MakeTrouble();
  void LoseComputeWorker();
  void LoseAttentionWorker();
  void FailSomeStep();

  // What comes.
  bool LetSomethingCome();
  void LetPlanCome(ComputeWorker& worker);
  void LetMemberCome(ComputeWorker& worker);
  bool MayAnswer(const std::tuple<uint32_t, int, StepId>& from, const Serving& serving) const;
  void LetAnswerCome(const std::tuple<uint32_t, int, StepId>& from, Serving& serving);
  void LetRankFrameCome();
  void EndWork(ComputeWorker& worker, MicroBatchId id);
  void EndKeeping(ComputeWorker& worker);

  // A core and its shell.
  void Feed(ComputeWorker& worker, Event event);
  void Handle(ComputeWorker& worker, Event event, std::deque<Action>& to_do);
  void NoteReason(ComputeWorker& worker, const Event& event);
  void Watch(ComputeWorker& worker, const Action& action);
  void WatchEnd(ComputeWorker& worker, const FinishStep& finish);
  void CheckNotLost(ComputeWorker& worker, const Action& action);
  void CheckScratch(const ComputeWorkerCore& core);
  StepWatch* Running(ComputeWorker& worker, MicroBatchId id);
  bool NamesUnknown(const ComputeWorker& worker, const proto::StepPlan& plan) const;
  void Perform(ComputeWorker& worker, const Action& action);
  void PerformForWorkers(ComputeWorker& worker, const Action& action);
  void PerformForRanks(ComputeWorker& worker, const Action& action);
  Serving* ServingOf(const ComputeWorker& worker, NodeId node, StepId step);
  void Answer(ComputeWorker& worker, const WorkerPart& part, MicroBatchId id, int op, int64_t bytes);
  void ToOther(const proto::RankAddress& to, Event event);
  SampleDone Draw(ComputeWorker& worker, MicroBatchId id);
  StepFailed SomeFailure(ComputeWorker& worker, MicroBatchId id);
  int IndexOf(const ComputeWorker& worker) const { return static_cast<int>(&worker - workers_.data()); }

  std::mt19937 random_;
  const proto::AttentionTable table_;
  const StepProgram program_;
  const ComputeWorkerOptions options_;
  std::vector<ComputeWorker> workers_;
  std::vector<AttentionWorkerAddress> attention_;                 // as they are now
  std::map<std::tuple<uint32_t, int, StepId>, Serving> serving_;  // by node, compute worker and step
  std::vector<ToRank> to_ranks_, late_;
  std::vector<std::weak_ptr<const void>> tensors_;  // all that ranks have sent
  std::vector<Sequence> sequences_;
  std::map<StepId, Planned> planned_;
  std::map<StepId, Group> groups_;
  const std::vector<std::byte> answer_;
  uint64_t next_step_ = 1, next_sequence_ = 1;
  uint32_t next_node_ = 100;
  int trouble_ = 0;  // 0: none; else the more, the less of it
  bool ending_ = false;
  Counts counts_;
};

}  // namespace dovetail::compute
