// The cores of a CoreCluster: what they are told, and what becomes of what they ask for.
#include <algorithm>

#include "compute_worker/last_rows.h"
#include "gtest/gtest.h"
#include "proto/pass_q.h"
#include "tests/compute_worker/core_cluster.h"
#include "tests/compute_worker/rank_fixture.h"

namespace dovetail::compute {

using proto::StepEntry;
using proto::StepPlan;
using proto::StepStatus;

namespace {

MicroBatchId IdOf(const Action& action) {
  return std::visit([](const auto& a) { return a.micro_batch; }, action);
}

// What is done for a step that has ended, too.
bool IsOfEndedStep(const Action& action) {
  return std::holds_alternative<FinishStep>(action) || std::holds_alternative<KeepRankRows>(action) ||
         std::holds_alternative<SendRankAttended>(action) || std::holds_alternative<SendRankOutputs>(action);
}

}  // namespace

void CoreCluster::Feed(ComputeWorker& worker, Event event) {
  std::deque<Action> to_do;
  Handle(worker, std::move(event), to_do);
  for (; !to_do.empty(); to_do.pop_front()) {
    const MicroBatchId id = IdOf(to_do.front());
    // What was asked for before a step failed is void.
    const bool runs = id.value() < worker.work.size() && worker.core->running(id);
    if (!runs && !IsOfEndedStep(to_do.front())) continue;
    if (runs && !IsOfEndedStep(to_do.front()) && Trouble(500)) {
      Handle(worker, SomeFailure(worker, id), to_do);
    } else {
      Perform(worker, to_do.front());
    }
  }
}

void CoreCluster::Handle(ComputeWorker& worker, Event event, std::deque<Action>& to_do) {
  NoteReason(worker, event);
  std::vector<Action> actions;
  worker.core->Handle(std::move(event), actions);
  EXPECT_EQ(worker.core->CheckInvariants(), absl::OkStatus());
  for (Action& action : actions) {
    Watch(worker, action);
    to_do.push_back(std::move(action));
  }
}

StepWatch* CoreCluster::Running(ComputeWorker& worker, MicroBatchId id) {
  const auto& step = worker.running[id.value()];
  return step.has_value() ? &worker.watches.at(*step) : nullptr;
}

// Why a step must end, if the event says so.
void CoreCluster::NoteReason(ComputeWorker& worker, const Event& event) {
  if (const auto* withdrawn = std::get_if<StepWithdrawn>(&event))
    if (worker.unfinished.contains(withdrawn->step))
      worker.watches.at(withdrawn->step).MustEnd(StepStatus::kWorkerFailed);
  if (const auto* refused = std::get_if<StepRefused>(&event)) {
    StepWatch* const watch = Running(worker, refused->micro_batch);
    if (watch != nullptr && watch->plan().step == refused->step)
      watch->MustEnd(refused->refused.out_of_memory      ? StepStatus::kOutOfMemory
                     : !refused->refused.damaged.empty() ? StepStatus::kDamaged
                                                         : StepStatus::kWorkerFailed);
  }
  const auto* lost = std::get_if<AttentionWorkerLost>(&event);
  for (size_t m = 0; lost != nullptr && m < worker.running.size(); ++m) {
    const MicroBatchId id(static_cast<uint16_t>(m));
    StepWatch* const watch = Running(worker, id);
    for (const WorkerPart& part : worker.core->PartsOf(id))
      if (watch != nullptr && part.worker == lost->worker && part.epoch == lost->epoch)
        watch->MustEnd(StepStatus::kWorkerUnreachable);
  }
  if (const auto* failed = std::get_if<StepFailed>(&event)) {
    StepWatch* const watch = Running(worker, failed->micro_batch);
    const bool only = worker.core->PartsOf(failed->micro_batch).size() == 1;
    const bool unreachable = failed->unanswered >= 0 || (absl::IsUnavailable(failed->status) && only);
    watch->MustEnd(unreachable                                 ? StepStatus::kWorkerUnreachable
                   : absl::IsResourceExhausted(failed->status) ? StepStatus::kOutOfMemory
                                                               : StepStatus::kWorkerFailed);
    watch->WorkEnds();
    worker.work[failed->micro_batch.value()] = Work::kNone;
  }
}

// ---- what a core asks for ----

void CoreCluster::Watch(ComputeWorker& worker, const Action& action) {
  if (const auto* finish = std::get_if<FinishStep>(&action)) return WatchEnd(worker, *finish);
  const size_t id = IdOf(action).value();
  if (const auto* begin = std::get_if<SendStepBegin>(&action)) {
    if (worker.running[id] != begin->step) {
      EXPECT_FALSE(worker.running[id].has_value()) << "a micro-batch has one step at a time";
      worker.running[id] = begin->step;
      EXPECT_FALSE(worker.watches.at(begin->step).ended()) << "a step begins once";
      if (worker.core->DrawnBy(begin->micro_batch)) ++counts_.ahead;
    }
  }
  CheckNotLost(worker, action);
  const auto* keep = std::get_if<KeepRankRows>(&action);
  const std::optional<StepId> step = keep != nullptr                  ? keep->step
                                     : worker.running[id].has_value() ? worker.running[id]
                                                                      : worker.last[id];
  ASSERT_TRUE(step.has_value()) << "an action without a step";
  worker.watches.at(*step).Asks(action);
}

void CoreCluster::WatchEnd(ComputeWorker& worker, const FinishStep& finish) {
  EXPECT_EQ(worker.unfinished.erase(finish.result.step), 1u) << "a step ends once, and if it was planned";
  const auto found = worker.watches.find(finish.result.step);
  ASSERT_NE(found, worker.watches.end());
  StepWatch& watch = found->second;
  const size_t id = finish.micro_batch.value();
  if (worker.running[id] == finish.result.step) {
    worker.running[id].reset();
    worker.last[id] = finish.result.step;
  } else {  // it never began
    ++counts_.refused;
    EXPECT_NE(finish.result.status, StepStatus::kOk);
    if (NamesUnknown(worker, watch.plan())) watch.MustEnd(StepStatus::kWorkerUnreachable);
  }
  watch.Asks(finish);
  for (auto& [step, other] : worker.watches) {
    if (other.draws_for_it != finish.result.step) continue;
    EXPECT_FALSE(other.began() && other.ended()) << "steps end in the order in which they draw";
    if (finish.result.status != StepStatus::kOk) other.MustEnd(finish.result.status);
  }
}

bool CoreCluster::NamesUnknown(const ComputeWorker& worker, const StepPlan& plan) const {
  for (const StepEntry& entry : plan.entries)
    for (const proto::Shard& shard : entry.placement)
      if (!worker.known.contains({shard.worker, shard.epoch})) return true;
  return false;
}

void CoreCluster::CheckNotLost(ComputeWorker& worker, const Action& action) {
  const auto check = [&](const WorkerPart& part) {
    EXPECT_FALSE(worker.lost.contains({part.worker, part.epoch}))
        << "attention worker " << part.worker.value() << " is lost and is asked";
  };
  const auto* begin = std::get_if<SendStepBegin>(&action);
  const auto* ask = std::get_if<AskRows>(&action);
  const bool all = std::holds_alternative<SendQuery>(action) || std::holds_alternative<SendKeyValue>(action);
  for (const WorkerPart& part : worker.core->PartsOf(IdOf(action)))
    if (all || (begin != nullptr && begin->to == part.node) || (ask != nullptr && ask->to == part.node)) check(part);
  if (std::holds_alternative<PrepareStep>(action)) CheckScratch(*worker.core);
}

// Each block is free or has one prompt's tokens, and those of ended steps are in no step.
void CoreCluster::CheckScratch(const ComputeWorkerCore& core) {
  std::set<uint32_t> blocks;
  size_t held = 0;
  for (const Sequence& sequence : sequences_) {
    const PromptScratch::Part* const part = core.scratch().Find(sequence.id);
    if (part == nullptr) continue;
    EXPECT_FALSE(core.idle() && part->in_step) << "sequence " << sequence.id.value();
    for (const PromptScratch::Segment& segment : part->segments) {
      held += segment.blocks.size();
      blocks.insert(segment.blocks.begin(), segment.blocks.end());
    }
  }
  EXPECT_EQ(blocks.size(), held) << "a block of two prompts";
  EXPECT_EQ(held + core.scratch().free_blocks(), core.scratch().capacity());
}

// ---- what becomes of it ----

void CoreCluster::Perform(ComputeWorker& worker, const Action& action) {
  const size_t id = IdOf(action).value();
  if (std::holds_alternative<RunDense>(action)) worker.work[id] = Work::kDense;
  if (std::holds_alternative<AttendPrompts>(action) || std::holds_alternative<AttendShard>(action) ||
      std::holds_alternative<AttendHeads>(action) || std::holds_alternative<AttendQueries>(action))
    worker.work[id] = Work::kAttend;
  if (std::holds_alternative<Sample>(action)) worker.work[id] = Work::kSample;
  if (const auto* keep = std::get_if<KeepRankRows>(&action)) {
    const bool kept = worker.core->PartToKeepIn(keep->micro_batch, keep->step) != nullptr && !Trouble(20);
    counts_.kept += kept;
    worker.keeping.push_back({keep->micro_batch, keep->step, keep->op, keep->rank, kept});
  }
  if (const auto* finish = std::get_if<FinishStep>(&action)) return TakeResult(finish->result);
  PerformForWorkers(worker, action);
  PerformForRanks(worker, action);
}

// Null: it is lost, or has refused the step.
CoreCluster::Serving* CoreCluster::ServingOf(const ComputeWorker& worker, NodeId node, StepId step) {
  const auto found = serving_.find({node.value(), IndexOf(worker), step});
  return found == serving_.end() || found->second.refuses ? nullptr : &found->second;
}

void CoreCluster::Answer(ComputeWorker& worker, const WorkerPart& part, MicroBatchId id, int op, int64_t bytes) {
  const StepId step = *worker.running[id.value()];
  ASSERT_LE(static_cast<size_t>(bytes), answer_.size());
  if (Serving* const serving = ServingOf(worker, part.node, step))
    serving->answers.push_back(
        PartialArrived{part.node, part.epoch, step, id, op, std::span(answer_).first(static_cast<size_t>(bytes))});
}

void CoreCluster::PerformForWorkers(ComputeWorker& worker, const Action& action) {
  const MicroBatchId id = IdOf(action);
  if (const auto* begin = std::get_if<SendStepBegin>(&action)) {
    const bool there = std::any_of(attention_.begin(), attention_.end(),
                                   [&](const AttentionWorkerAddress& address) { return address.node == begin->to; });
    if (!there) return;
    Serving& serving = serving_[{begin->to.value(), IndexOf(worker), begin->step}];
    serving.refuses = Trouble(60);
    proto::StepRefused why{.out_of_memory = Coin(2), .reason = "it will not"};
    if (!why.out_of_memory && Coin(2)) why.damaged = {begin->message.entries[0].sequence};
    if (serving.refuses)
      serving.answers.push_back(StepRefused{begin->to, begin->epoch, begin->step, id, std::move(why)});
  }
  const auto* query = std::get_if<SendQuery>(&action);
  const auto* key_value = std::get_if<SendKeyValue>(&action);
  const int op = query != nullptr ? query->op : key_value != nullptr ? key_value->op : -1;
  for (const WorkerPart& part : worker.core->PartsOf(id)) {
    if (op < 0) break;
    const proto::StepLayout& layout = part.layouts[table_.op_group[op].value()];
    if (query != nullptr && layout.before_bytes > 0) Answer(worker, part, id, op, layout.before_bytes);
    if (key_value != nullptr && !layout.items.empty() && layout.pieces == 0)
      Answer(worker, part, id, op, layout.partial_bytes);
  }
  const auto* ask = std::get_if<AskRows>(&action);
  for (const WorkerPart& part : worker.core->PartsOf(id)) {
    if (ask == nullptr || part.node != ask->to) continue;
    Serving* const serving = ServingOf(worker, part.node, *worker.running[id.value()]);
    if (serving == nullptr) break;
    const LayerGroup group = table_.op_group[ask->op];
    const proto::StepLayout& layout = part.layouts[group.value()];
    const auto bytes = static_cast<size_t>(layout.PieceAt(ask->piece, table_.softmax(group)).bytes);
    serving->pieces.push_back(EarlierRowsArrived{part.node, part.epoch, *worker.running[id.value()], id, ask->op,
                                                 ask->piece, RankTensor(std::vector<std::byte>(bytes))});
    ++counts_.pieces;
    if (ask->piece + 1 == layout.pieces) Answer(worker, part, id, ask->op, layout.partial_bytes);
  }
}

void CoreCluster::ToOther(const proto::RankAddress& to, Event event) {
  if (const auto* state = std::get_if<RankStateArrived>(&event)) tensors_.push_back(state->state.owner);
  if (const auto* rows = std::get_if<RankRowsArrived>(&event)) tensors_.push_back(rows->rows.owner);
  if (const auto* heads = std::get_if<RankHeadsArrived>(&event)) tensors_.push_back(heads->rows.owner);
  if (const auto* outputs = std::get_if<RankOutputsArrived>(&event)) tensors_.push_back(outputs->outputs.owner);
  to_ranks_.push_back({static_cast<int>(to.worker.value()), to.step, std::move(event)});
}

// As rank_fixture.cc makes it.
void CoreCluster::PerformForRanks(ComputeWorker& worker, const Action& action) {
  const StepPlan& plan = worker.core->PlanOf(IdOf(action));
  if (plan.ranks.empty()) return;
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  const int own = plan.part.rank;
  const bool asks = plan.entries[0].exchange == proto::PrefixExchange::kPassQ;
  const auto rank_of = [&](const proto::RankAddress& to) {
    return static_cast<int>(std::find(plan.ranks.begin(), plan.ranks.end(), to) - plan.ranks.begin());
  };
  if (const auto* send = std::get_if<SendRankState>(&action))
    ToOther(send->to, RankStateArrived{send->to.step, send->to.micro_batch, send->op, StateOf(table_, own, send->op)});
  if (const auto* send = std::get_if<SendRankRows>(&action))
    for (const auto& [to, first] : send->receivers)
      ToOther(to, RankRowsArrived{to.step, to.micro_batch, send->op, own,
                                  RowsOf(table_, own, send->op, cuts[own] + first, cuts[own + 1])});
  if (const auto* send = std::get_if<ForwardRankRows>(&action))
    ToOther(send->to,
            RankRowsArrived{send->to.step, send->to.micro_batch, send->op, send->rank,
                            LastRows(send->rows.bytes, table_.softmax(table_.op_group[send->op]), send->first_row)});
  if (const auto* send = std::get_if<SendRankAttended>(&action))
    ToOther(send->to, RankAttended{send->to.step, send->to.micro_batch, send->op, send->rank});
  if (const auto* send = std::get_if<SendRankHeads>(&action))
    for (const auto& [to, heads] : send->receivers)
      ToOther(to, RankHeadsArrived{to.step, to.micro_batch, send->op, own,
                                   HeadsOf(table_, send->op, cuts, own, rank_of(to))});
  if (const auto* send = std::get_if<SendRankQueries>(&action))
    for (const auto& [to, rows] : send->receivers)
      ToOther(to, RankHeadsArrived{to.step, to.micro_batch, send->op, own,
                                   QueriesOf(table_, send->op, cuts, own, rank_of(to))});
  if (const auto* send = std::get_if<SendRankOutputs>(&action)) {
    const bool linear = table_.linear(table_.op_group[send->op]) != nullptr;
    ToOther(send->to, RankOutputsArrived{send->to.step, send->to.micro_batch, send->op, own,
                                         asks && !linear ? PartialsOf(table_, send->op, cuts, own, rank_of(send->to))
                                                         : OutputsOf(table_, send->op, cuts, own, rank_of(send->to))});
  }
}

// ---- the device ----

// Tokens are drawn in the order of the steps that draw them.
void CoreCluster::EndWork(ComputeWorker& worker, MicroBatchId id) {
  Work& work = worker.work[id.value()];
  StepWatch& watch = *Running(worker, id);
  if (work == Work::kDense || work == Work::kAttend) {
    work = Work::kNone;
    watch.WorkEnds();
    return Feed(worker, DenseDone{id});
  }
  if (work == Work::kSample && Coin(2)) {
    work = Work::kDrawing;
    return Feed(worker, SampleBegun{id});
  }
  if (worker.unfinished.contains(watch.draws_for_it)) return;
  work = Work::kNone;
  watch.WorkEnds();
  Feed(worker, Draw(worker, id));
}

SampleDone CoreCluster::Draw(ComputeWorker& worker, MicroBatchId id) {
  const StepPlan& plan = worker.core->PlanOf(id);
  SampleDone done{id, {.step = plan.step, .micro_batch = id}};
  for (const StepEntry& entry : plan.entries) {
    if (!entry.sample) continue;
    proto::EntryResult& drawn = done.result.entries.emplace_back();
    drawn.sequence = entry.sequence;
    drawn.position = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    drawn.status = Coin(20) ? StepStatus::kBadLogits : StepStatus::kOk;
    drawn.token = drawn.status == StepStatus::kOk ? 9 : -1;
  }
  return done;
}

StepFailed CoreCluster::SomeFailure(ComputeWorker& worker, MicroBatchId id) {
  const int parts = static_cast<int>(worker.core->PartsOf(id).size());
  if (Coin(3)) return {id, absl::ResourceExhaustedError("no memory")};
  if (Coin(2)) return {id, absl::UnavailableError("nothing came"), Coin(2) ? Of(0, parts - 1) : -1};
  return {id, absl::InternalError("a kernel refused")};
}

void CoreCluster::FailSomeStep() {
  ComputeWorker& worker = workers_[static_cast<size_t>(Of(0, static_cast<int>(workers_.size()) - 1))];
  const MicroBatchId id(static_cast<uint16_t>(Of(0, static_cast<int>(worker.work.size()) - 1)));
  if (worker.core->running(id)) Feed(worker, SomeFailure(worker, id));
}

void CoreCluster::EndKeeping(ComputeWorker& worker) {
  const size_t next = random_() % worker.keeping.size();
  const RankRowsKept kept = worker.keeping[next];
  worker.keeping.erase(worker.keeping.begin() + static_cast<int64_t>(next));
  Feed(worker, kept);
}

}  // namespace dovetail::compute
