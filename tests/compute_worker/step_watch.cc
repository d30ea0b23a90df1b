#include "tests/compute_worker/step_watch.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "proto/gather_frames.h"
#include "proto/pass_q.h"

namespace dovetail::compute {

using proto::PrefixExchange;
using proto::StepStatus;

StepWatch::StepWatch(const ComputeWorkerCore& core, const StepProgram& program, proto::StepPlan plan)
    : core_(core), program_(program), plan_(std::move(plan)) {}

bool StepWatch::switches(int op) const {
  if (linear(op))
    return core_.options().rank_state_switch && !plan_.ranks.empty() &&
           plan_.entries[0].linear_exchange == proto::LinearExchange::kSwitch;
  return exchanges(PrefixExchange::kSwitch);
}

std::vector<Position> StepWatch::Cuts() const { return proto::PassQCuts(plan_); }

const proto::StepLayout& StepWatch::LayoutOf(const WorkerPart& part, int op) const {
  return part.layouts[core_.table().op_group[op].value()];
}

// ---- what comes ----

void StepWatch::Comes(const PartialArrived& event) { --answers_[{event.from, event.op}]; }

void StepWatch::Comes(const EarlierRowsArrived& event) {
  EXPECT_LT(event.piece, (pieces_[{event.from, event.op}].first)) << "a piece that was not asked for";
}

void StepWatch::Comes(const RankAttended& event) {
  for (auto& [step, there] : unattended_)
    if (exchanges(PrefixExchange::kRing) || plan_.ranks[static_cast<size_t>(event.rank)].step == StepId(step))
      there.erase({event.op, exchanges(PrefixExchange::kRing) ? event.rank : plan_.part.rank});
}

// ---- what the core asks for ----

void StepWatch::Asks(const Action& action) {
  const bool gives_back =
      std::holds_alternative<KeepRankRows>(action) || std::holds_alternative<SendRankAttended>(action);
  EXPECT_TRUE(!ended_ || (plan_.gives_back && gives_back)) << "step " << plan_.step.value() << " has ended";
  std::visit([&](const auto& a) { Ask(a); }, action);
}

void StepWatch::Ask(const SendStepBegin& a) {
  EXPECT_FALSE(prepared_) << "workers are told of a step before its buffers are sized";
  EXPECT_TRUE(begun_.insert(a.to).second) << "worker " << a.to.value() << " is told of a step once";
}

void StepWatch::Ask(const PrepareStep&) {
  EXPECT_EQ(begun_.size(), parts().size());
  EXPECT_FALSE(std::exchange(prepared_, true)) << "prepared once";
}

// One thing at a time, none once the token is drawn but answers to later ranks.
void StepWatch::BeginWork() {
  EXPECT_TRUE(prepared_);
  EXPECT_FALSE(std::exchange(at_work_, true)) << "the step is at work";
}

bool StepWatch::IsAhead(StageKind kind, int op) const {
  return std::any_of(program_.begin() + static_cast<int64_t>(stage_), program_.end(),
                     [&](const Stage& stage) { return stage.kind == kind && stage.index == op; });
}

// The stages before that one are behind the step.
void StepWatch::Reach(StageKind kind, int index) {
  EXPECT_FALSE(sampled_) << "its tokens are drawn";
  if (!IsAhead(kind, index)) {
    ADD_FAILURE() << "stage " << static_cast<int>(kind) << " of " << index << " comes twice or too late";
    return;
  }
  for (; program_[stage_].kind != kind || program_[stage_].index != index; ++stage_) CheckPassed(program_[stage_]);
  ++stage_;
}

void StepWatch::CheckPassed(const Stage& stage) {
  switch (stage.kind) {
    case StageKind::kDense: ADD_FAILURE() << "dense piece " << stage.index << " is left out"; return;
    case StageKind::kSendQuery: ADD_FAILURE() << "q of op " << stage.index << " is left out"; return;
    case StageKind::kSendKeyValue:
      EXPECT_TRUE(core_.options().hand_over_at_end) << "k and v of op " << stage.index << " are left out";
      held_.push_back(stage.index);
      return;
    case StageKind::kAttendPrompts:
      EXPECT_FALSE(AttendsHere(stage.index)) << "prompts of op " << stage.index << " are left out";
      if (switches(stage.index) && linear(stage.index)) CheckExchanged(stage.index);
      return;
    case StageKind::kAwaitPartials:
      CheckAnswered(stage.index);
      CheckAnsweredBefore(stage.index + 2 - core_.options().key_values_in_flight);
      CheckExchanged(stage.index);
      return;
  }
}

bool StepWatch::AttendsHere(int op) const {
  if (switches(op)) return false;
  return linear(op) ? !core_.StatesOf(plan_.micro_batch).empty() : !core_.PromptsOf(plan_.micro_batch).empty();
}

// What the op needs of attention workers is there.
void StepWatch::CheckAnswered(int op) {
  for (const WorkerPart& part : parts()) {
    const proto::StepLayout& layout = LayoutOf(part, op);
    const bool awaited = layout.asks() || (layout.with_states && layout.partial_bytes > 0);
    // Where states cross and nothing was asked, no op waits for the answer to what they leave.
    const int may_miss = layout.with_states && layout.partial_bytes == 0 ? 1 : 0;
    EXPECT_TRUE(!awaited || answers_[std::pair(part.node, op)] <= may_miss)
        << "op " << op << " goes on without the answer of worker " << part.worker.value();
    EXPECT_EQ((pieces_[{part.node, op}]), OpAndRank(layout.pieces, layout.pieces)) << "pieces of op " << op;
  }
}

// K and V of ops before that one are the workers' own by now.
void StepWatch::CheckAnsweredBefore(int op) {
  if (!held_.empty()) return;
  for (const auto& [of, missing] : answers_)
    EXPECT_TRUE(of.second >= op || missing == 0) << "worker " << of.first << " still reads K and V of op " << of.second;
}

// What the op needs of other ranks is there, and they have what they need of this one.
void StepWatch::CheckExchanged(int op) {
  if (plan_.ranks.empty()) return;
  const int own = plan_.part.rank, ranks = plan_.part.ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    if (switches(op)) {
      EXPECT_TRUE(did_.contains({'H', op, rank})) << "heads of rank " << rank << " in op " << op;
      EXPECT_TRUE(rank == own || did_.contains({'P', op, rank})) << "outputs of rank " << rank << " in op " << op;
    }
    if (linear(op) || rank >= own) continue;
    const bool asked = exchanges(PrefixExchange::kPassQ) && proto::PassQQueryBytes(SpecOf(op), Cuts(), own, rank) > 0;
    EXPECT_TRUE(!asked || did_.contains({'P', op, rank})) << "partials of rank " << rank << " in op " << op;
    const auto rows = core_.RowsFrom(plan_.micro_batch, op, rank);
    const auto& prompts = core_.PromptsOf(plan_.micro_batch);
    const bool attended = exchanges(PrefixExchange::kRing) && !prompts.empty() && rows.begin < rows.end;
    EXPECT_TRUE(!attended || did_.contains({'A', op, rank})) << "K and V of rank " << rank << " in op " << op;
  }
}

void StepWatch::Ask(const RunDense& a) {
  Reach(StageKind::kDense, a.index);
  BeginWork();
}

void StepWatch::Ask(const SendQuery& a) {
  Reach(StageKind::kSendQuery, a.op);
  for (const WorkerPart& part : parts())
    if (LayoutOf(part, a.op).before_bytes > 0) ++answers_[{part.node, a.op}];
}

void StepWatch::Ask(const SendKeyValue& a) {
  if (IsAhead(StageKind::kSendKeyValue, a.op)) {
    Reach(StageKind::kSendKeyValue, a.op);
  } else {  // held until all layers are done
    EXPECT_EQ(stage_, program_.size());
    ASSERT_FALSE(held_.empty()) << "k and v of op " << a.op << " are sent again";
    EXPECT_EQ(held_.front(), a.op);
    held_.erase(held_.begin());
  }
  for (const WorkerPart& part : parts())
    if (!LayoutOf(part, a.op).items.empty()) ++answers_[{part.node, a.op}];
}

void StepWatch::Ask(const AskRows& a) {
  auto& [asked, kept] = pieces_[{a.to, a.op}];
  EXPECT_EQ(a.piece, asked++) << "pieces are asked for in order";
  EXPECT_LE(asked - kept, proto::kGatherPiecesAhead);
}

void StepWatch::Ask(const KeepEarlierRows& a) {
  auto& [asked, kept] = pieces_[{parts()[static_cast<size_t>(a.part)].node, a.op}];
  EXPECT_EQ(a.piece, kept++) << "pieces are kept in order";
  EXPECT_LE(kept, asked);
}

void StepWatch::Ask(const AttendPrompts& a) {
  Reach(StageKind::kAttendPrompts, a.op);
  BeginWork();
  EXPECT_TRUE(AttendsHere(a.op));
  if (exchanges(PrefixExchange::kPassQ) && !linear(a.op)) op_at_[core_.PlaceOfKeys(plan_.micro_batch, a.op)] = a.op;
  const bool ring = exchanges(PrefixExchange::kRing);
  for (const WorkerPart& part : parts()) {
    const proto::StepLayout& layout = LayoutOf(part, a.op);
    const bool state = linear(a.op) && layout.before_bytes > 0;
    EXPECT_TRUE(!state || answers_[std::pair(part.node, a.op)] == 0) << "the state before op " << a.op;
    if (linear(a.op) || layout.gather_bytes == 0 || (ring && plan_.part.rank > 0)) continue;
    EXPECT_EQ((answers_[{part.node, a.op}]), 0) << "earlier tokens of op " << a.op;
    EXPECT_EQ(pieces_[std::pair(part.node, a.op)].second, layout.pieces) << "earlier tokens of op " << a.op;
  }
  for (const StateEntry& state : core_.StatesOf(plan_.micro_batch))
    EXPECT_TRUE(!linear(a.op) || !state.chained || Came('S', a.op, 0)) << "the state of the rank before";
  for (const PromptEntry& prompt : core_.PromptsOf(plan_.micro_batch)) {
    if (linear(a.op) || !prompt.from_ranks || prompt.ring || ring) continue;
    for (int rank = 0; rank < plan_.part.rank; ++rank) {
      const proto::TokenRange rows = core_.RowsFrom(plan_.micro_batch, a.op, rank);
      EXPECT_TRUE(rows.begin == rows.end || Came('R', a.op, rank)) << "K and V of rank " << rank << ", op " << a.op;
    }
  }
}

void StepWatch::Ask(const AttendShard& a) {
  BeginWork();
  EXPECT_LT(a.rank, plan_.part.rank);
  EXPECT_TRUE(Came('R', a.op, a.rank)) << "K and V of rank " << a.rank;
  EXPECT_FALSE(core_.RankRows(plan_.micro_batch, a.op, a.rank).empty()) << "they are not kept";
  EXPECT_TRUE(did_.insert({'A', a.op, a.rank}).second) << "attended to twice";
}

void StepWatch::Ask(const SendRankState& a) {
  EXPECT_EQ(a.to, plan_.ranks[static_cast<size_t>(plan_.part.rank) + 1]);
  EXPECT_TRUE(did_.insert({'S', a.op, 0}).second) << "handed on twice";
}

// `most`: tensors that the receiver holds of this rank and has not attended to.
void StepWatch::NoteSentTo(const proto::RankAddress& to, int op, int rank, size_t most) {
  auto& there = unattended_[to.step.value()];
  EXPECT_TRUE(there.insert({op, rank}).second) << "K and V of op " << op << " are sent again";
  EXPECT_LE(there.size(), most) << "what a rank holds is bounded";
  EXPECT_TRUE(did_.insert({'>', op * 64 + rank, static_cast<int>(to.worker.value())}).second);
}

void StepWatch::Ask(const SendRankRows& a) {
  EXPECT_EQ(a.rank, plan_.part.rank);
  for (const SendRankRows::Receiver& receiver : a.receivers) {
    const bool ring = exchanges(PrefixExchange::kRing);
    EXPECT_TRUE(plan_.gives_back || receiver.to.begin > plan_.ranks[static_cast<size_t>(a.rank)].begin);
    NoteSentTo(receiver.to, a.op, a.rank, ring ? kRingShards : kRankOpsAhead);
  }
}

void StepWatch::Ask(const ForwardRankRows& a) {
  EXPECT_TRUE(Came('R', a.op, a.rank)) << "K and V of rank " << a.rank;
  EXPECT_EQ(a.to, plan_.ranks[static_cast<size_t>(plan_.part.rank) + 1]);
  NoteSentTo(a.to, a.op, a.rank, kRingShards);
}

void StepWatch::Ask(const KeepRankRows& a) {
  EXPECT_TRUE(plan_.gives_back);
  EXPECT_GT(a.rank, plan_.part.rank);
  EXPECT_TRUE(did_.insert({'K', a.op, a.rank}).second) << "kept twice";
}

void StepWatch::Ask(const SendRankAttended& a) {
  const auto to = static_cast<int>(a.to.worker.value());
  EXPECT_TRUE(did_.insert({'T', a.op * 64 + a.rank, to}).second) << "rank " << to << " is told once of op " << a.op;
}

void StepWatch::Ask(const SendRankHeads& a) {
  EXPECT_TRUE(switches(a.op));
  EXPECT_EQ(a.receivers.size(), static_cast<size_t>(plan_.part.ranks) - 1);
  EXPECT_TRUE(did_.insert({'h', a.op, 0}).second) << "sent twice";
}

// In the order of the ranks, for each sees those before.
void StepWatch::Ask(const AttendHeads& a) {
  BeginWork();
  EXPECT_TRUE(a.rank == plan_.part.rank || Came('H', a.op, a.rank)) << "heads of rank " << a.rank;
  EXPECT_TRUE(a.rank == 0 || did_.contains({'H', a.op, a.rank - 1})) << "tokens of rank " << a.rank - 1;
  EXPECT_TRUE(did_.insert({'H', a.op, a.rank}).second) << "attended to twice";
}

void StepWatch::Ask(const SendRankQueries& a) {
  for (const SendRankQueries::Receiver& receiver : a.receivers)
    EXPECT_LT(receiver.to.begin, plan_.ranks[static_cast<size_t>(plan_.part.rank)].begin) << "attention is causal";
  EXPECT_TRUE(did_.insert({'q', a.op, 0}).second) << "asked twice";
}

void StepWatch::Ask(const AttendQueries& a) {
  EXPECT_FALSE(std::exchange(at_work_, true)) << "the step is at work";
  EXPECT_GT(a.rank, plan_.part.rank);
  EXPECT_TRUE(Came('H', a.op, a.rank)) << "queries of rank " << a.rank;
  EXPECT_FALSE(IsAhead(StageKind::kAttendPrompts, a.op)) << "its own K and V are not there";
  EXPECT_EQ(op_at_[core_.PlaceOfKeys(plan_.micro_batch, a.op)], a.op) << "its own K and V are not there any more";
  EXPECT_TRUE(did_.insert({'Q', a.op, a.rank}).second) << "answered twice";
}

void StepWatch::Ask(const SendRankOutputs& a) {
  const auto to = static_cast<int>(a.to.worker.value());
  EXPECT_TRUE(did_.insert({'o', a.op, to}).second) << "given twice";
}

void StepWatch::Ask(const PlaceRankOutputs& a) {
  EXPECT_TRUE(Came('O', a.op, a.rank));
  EXPECT_TRUE(did_.insert({'P', a.op, a.rank}).second) << "placed twice";
}

void StepWatch::Ask(const Sample&) {
  for (; stage_ < program_.size(); ++stage_) CheckPassed(program_[stage_]);
  BeginWork();
  EXPECT_EQ(held_.size(), 0u) << "k and v are still here";
  EXPECT_FALSE(std::exchange(sampled_, true)) << "drawn twice";
}

void StepWatch::Ask(const FinishStep& a) {
  ended_ = true;
  EXPECT_FALSE(at_work_) << "its buffers are in use";
  EXPECT_EQ(a.result.step, plan_.step);
  EXPECT_EQ(a.result.micro_batch, plan_.micro_batch);
  EXPECT_EQ(static_cast<int>(a.result.status), static_cast<int>(why_.value_or(StepStatus::kOk))) << a.result.error;
  if (a.result.status == StepStatus::kOk) CheckEnd();
}

// After a step that has ended well no worker needs anything of it.
void StepWatch::CheckEnd() {
  EXPECT_TRUE(sampled_);
  for (const auto& [of, missing] : answers_)
    EXPECT_EQ(missing, 0) << "worker " << of.first << " has not answered op " << of.second;
  if (plan_.ranks.empty()) return;
  for (int op = 0; op < core_.table().op_count(); ++op) {
    for (int rank = plan_.part.rank + 1; rank < plan_.part.ranks; ++rank) {
      const bool asks = exchanges(PrefixExchange::kPassQ) && !linear(op) &&
                        proto::PassQQueryBytes(SpecOf(op), Cuts(), rank, plan_.part.rank) > 0;
      const auto to = static_cast<int>(plan_.ranks[static_cast<size_t>(rank)].worker.value());
      EXPECT_TRUE(!asks || did_.contains({'o', op, to})) << "rank " << rank << " was not answered about op " << op;
    }
    for (int rank = 0; rank < plan_.part.rank && plan_.gives_back; ++rank)
      EXPECT_FALSE(unattended_[plan_.ranks[static_cast<size_t>(rank)].step.value()].contains({op, plan_.part.rank}))
          << "rank " << rank << " has not kept K and V of op " << op;
  }
}

}  // namespace dovetail::compute
