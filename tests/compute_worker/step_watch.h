#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// One step of a core from its plan to its result: what was asked for it and what has come, and from that whether the
// core may ask for what it asks next. What it may not do is a failed expectation of the current test.
//   Threads: thread-compatible
class StepWatch {
 public:
  // Of a step that has begun; `core` and `program` outlive it.
  StepWatch(const ComputeWorkerCore& core, const StepProgram& program, proto::StepPlan plan);

  // Before the core is told of it, once for each, however often it comes.
  void Comes(const PartialArrived& event);
  void Comes(const EarlierRowsArrived& event);
  void Comes(const RankStateArrived& event) { came_.insert({'S', event.op, 0}); }
  void Comes(const RankRowsArrived& event) { came_.insert({'R', event.op, event.rank}); }
  void Comes(const RankHeadsArrived& event) { came_.insert({'H', event.op, event.rank}); }
  void Comes(const RankOutputsArrived& event) { came_.insert({'O', event.op, event.rank}); }
  void Comes(const RankAttended& event);
  // What it was at work on is done, or has failed.
  void WorkEnds() { at_work_ = false; }
  // The reason for which it must end, unless there was one before.
  void MustEnd(proto::StepStatus why) { why_ = why_.value_or(why); }

  // The core asks for it.
  void Asks(const Action& action);

  const proto::StepPlan& plan() const { return plan_; }
  bool began() const { return prepared_; }
  bool ended() const { return ended_; }
  // The step before, if that draws this one's tokens on the device.
  StepId draws_for_it;

 private:
  using OpAndRank = std::pair<int, int>;

  void Ask(const SendStepBegin& a);
  void Ask(const PrepareStep& a);
  void Ask(const RunDense& a);
  void Ask(const SendQuery& a);
  void Ask(const SendKeyValue& a);
  void Ask(const AskRows& a);
  void Ask(const KeepEarlierRows& a);
  void Ask(const AttendPrompts& a);
  void Ask(const AttendShard& a);
  void Ask(const SendRankState& a);
  void Ask(const SendRankRows& a);
  void Ask(const ForwardRankRows& a);
  void Ask(const KeepRankRows& a);
  void Ask(const SendRankAttended& a);
  void Ask(const SendRankHeads& a);
  void Ask(const AttendHeads& a);
  void Ask(const SendRankQueries& a);
  void Ask(const AttendQueries& a);
  void Ask(const SendRankOutputs& a);
  void Ask(const PlaceRankOutputs& a);
  void Ask(const Sample& a);
  void Ask(const FinishStep& a);

  void BeginWork();
  bool IsAhead(StageKind kind, int op) const;
  void Reach(StageKind kind, int index);
  void CheckPassed(const Stage& stage);
  void CheckAnswered(int op);
  void CheckExchanged(int op);
  void CheckAnsweredBefore(int op);
  void CheckEnd();
  void NoteSentTo(const proto::RankAddress& to, int op, int rank, size_t most);
  bool AttendsHere(int op) const;
  const std::vector<WorkerPart>& parts() const { return core_.PartsOf(plan_.micro_batch); }
  const proto::StepLayout& LayoutOf(const WorkerPart& part, int op) const;
  const proto::SoftmaxSpec& SpecOf(int op) const { return core_.table().softmax(core_.table().op_group[op]); }
  bool linear(int op) const { return SpecOf(op).linear(); }
  bool Came(char what, int op, int rank) const { return came_.contains({what, op, rank}); }
  bool exchanges(proto::PrefixExchange exchange) const {
    return !plan_.ranks.empty() && plan_.entries[0].exchange == exchange;
  }
  bool switches(int op) const;
  std::vector<Position> Cuts() const;

  const ComputeWorkerCore& core_;
  const StepProgram& program_;
  const proto::StepPlan plan_;
  std::set<NodeId> begun_;
  bool prepared_ = false, at_work_ = false, sampled_ = false, ended_ = false;
  size_t stage_ = 0;       // of the program, the next one
  std::vector<int> held_;  // ops whose k and v were passed over, to be sent at the end
  std::optional<proto::StepStatus> why_;
  int op_at_[kRankOpsAhead] = {-1, -1, -1, -1};         // whose K and V lie in each place, with pass-q
  std::map<std::pair<NodeId, int>, int> answers_;       // by worker and op, still to come
  std::map<std::pair<NodeId, int>, OpAndRank> pieces_;  // asked for and kept
  std::set<std::tuple<char, int, int>> came_;           // from ranks: what, op, rank
  std::set<std::tuple<char, int, int>> did_;            // likewise, what was to be done once
  std::map<uint64_t, std::set<OpAndRank>> unattended_;  // K and V by the step that they went to
};

}  // namespace dovetail::compute
