#include "tests/compute_worker/rank_fixture.h"

#include <algorithm>

#include "compute_worker/last_rows.h"
#include "gtest/gtest.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "proto/pass_q.h"
#include "tests/compute_worker/small_spec.h"

namespace dovetail::compute {
namespace {

constexpr Epoch kEpoch{1};

}  // namespace

StepProgram ProgramFor(const proto::AttentionTable& table) {
  StepProgram program;
  for (int op = 0; op < table.op_count(); ++op) {
    const bool state = table.linear(table.op_group[op]) != nullptr;
    program.push_back({StageKind::kDense, 2 * op});
    program.push_back({StageKind::kSendQuery, op});
    program.push_back({StageKind::kDense, 2 * op + 1});
    if (state) program.push_back({StageKind::kAttendPrompts, op});
    program.push_back({StageKind::kSendKeyValue, op});
    if (!state) program.push_back({StageKind::kAttendPrompts, op});
    program.push_back({StageKind::kAwaitPartials, op});
  }
  program.push_back({StageKind::kDense, 2 * table.op_count()});
  return program;
}

proto::AttentionTable HybridTable(int ops, int linear_op, int windowed_op, int window) {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  std::vector<proto::AttentionSpec> specs(ops, SmallSpec());
  std::vector<proto::LinearConstants> constants(ops);
  specs[linear_op] = state;
  constants[linear_op] = decays;
  std::get<proto::SoftmaxSpec>(specs[windowed_op]).window = window;
  return *proto::AttentionTable::Build(specs, constants);
}

std::vector<std::byte> StateOf(const proto::AttentionTable& table, int rank, int op) {
  const proto::SoftmaxSpec& spec = table.softmax(table.op_group[op]);
  return std::vector<std::byte>(static_cast<size_t>(spec.kv_heads * spec.state_bytes),
                                static_cast<std::byte>(16 * rank + op + 1));
}

std::vector<std::byte> RowsOf(const proto::AttentionTable& table, int rank, int op, Position begin, Position end) {
  const proto::SoftmaxSpec& spec = table.softmax(table.op_group[op]);
  const size_t row = static_cast<size_t>(spec.kv_heads) * (spec.key_dim + spec.value_dim) * SizeOf(spec.kv);
  return std::vector<std::byte>(static_cast<size_t>(end - begin) * row, static_cast<std::byte>(16 * rank + op + 1));
}

namespace {

std::vector<std::byte> BytesOf(int64_t bytes, int from, int op) {
  return std::vector<std::byte>(static_cast<size_t>(bytes), static_cast<std::byte>(16 * from + op + 1));
}

int HeadCount(const proto::SoftmaxSpec& spec, const std::vector<Position>& cuts, int rank) {
  return proto::HeadsOfRank(spec.kv_heads, rank, static_cast<int>(cuts.size()) - 1).size();
}

std::vector<Position> CutsOf(const proto::StepPlan& plan) {
  std::vector<Position> cuts;
  for (const proto::RankAddress& rank : plan.ranks) cuts.push_back(rank.begin);
  cuts.push_back(plan.part.end);
  return cuts;
}

}  // namespace

std::vector<std::byte> HeadsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts, int from,
                               int to) {
  const proto::SoftmaxSpec& spec = table.softmax(table.op_group[op]);
  const Position first = from == 0 ? cuts[0] / 64 * 64 : cuts[from];
  if (spec.linear())
    return BytesOf(proto::LinearRowsBytes(spec, {cuts[from], cuts[from + 1]}, from, HeadCount(spec, cuts, to)), from,
                   op);
  return BytesOf(proto::HeadRowsBytes(spec, {cuts[from], cuts[from + 1]}, first, HeadCount(spec, cuts, to)), from, op);
}

std::vector<std::byte> OutputsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                 int from, int to) {
  const proto::SoftmaxSpec& spec = table.softmax(table.op_group[op]);
  if (spec.linear())
    return BytesOf(proto::LinearOutputBytes(spec, {cuts[to], cuts[to + 1]}, HeadCount(spec, cuts, from)), from, op);
  return BytesOf(proto::HeadOutputBytes(spec, {cuts[to], cuts[to + 1]}, cuts[0] / 64 * 64, HeadCount(spec, cuts, from)),
                 from, op);
}

std::vector<std::byte> QueriesOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                 int from, int to) {
  return BytesOf(proto::PassQQueryBytes(table.softmax(table.op_group[op]), cuts, from, to), from, op);
}

std::vector<std::byte> PartialsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                  int from, int to) {
  return BytesOf(proto::PassQPartialBytes(table.softmax(table.op_group[op]), cuts, to, from), from, op);
}

proto::StepPlan RankPlan(const proto::AttentionTable& table, int rank, const std::vector<Position>& cuts,
                         uint64_t group, proto::PrefixExchange exchange, proto::LinearExchange linear) {
  const int ranks = static_cast<int>(cuts.size()) - 1;
  proto::StepEntry entry;
  entry.sequence = SequenceId(1);
  entry.ctx_len = cuts[rank];
  entry.tokens.assign(static_cast<size_t>(cuts[rank + 1] - cuts[rank]), 7);
  entry.exchange = exchange;
  entry.linear_exchange = linear;
  entry.placement = proto::WholePlacement(table, WorkerId(0), kEpoch);
  proto::StepPlan plan{StepId(group + rank), MicroBatchId(static_cast<uint16_t>(rank)), {entry}};
  plan.part = {StepId(group), cuts.front(), cuts.back(), rank, ranks};
  for (int r = 0; r < ranks; ++r)
    plan.ranks.push_back({WorkerId(r), StepId(group + r), MicroBatchId(static_cast<uint16_t>(r)), cuts[r]});
  return plan;
}

FakeRank::FakeRank(int rank, const proto::AttentionTable& table, uint32_t prompt_blocks, bool hand_over_at_end,
                   bool switches_states)
    : id_(static_cast<uint16_t>(rank)),
      core_(table, ProgramFor(table),
            {.micro_batches = 4,
             .max_step_tokens = 512,
             .vocab_size = 100,
             .prompt_blocks = prompt_blocks,
             .linear_prompts = true,
             .rank_rows = true,
             .rank_ring = true,
             .rank_switch = true,
             .rank_state_switch = switches_states,
             .rank_queries = true,
             .key_values_in_flight = hand_over_at_end ? table.op_count() : 4,
             .hand_over_at_end = hand_over_at_end}) {
  core_.AddAttentionWorker({WorkerId(0), kEpoch, NodeId(10)});
}

std::vector<std::string> FakeRank::errors() const {
  std::vector<std::string> errors;
  for (const proto::StepResult& result : results_) errors.push_back(result.error);
  return errors;
}

std::vector<FakeRank::ToRank> FakeRank::Feed(Event event) {
  std::vector<ToRank> sent;
  std::deque<Event> events, frames;  // the worker looks at frames when it has nothing else to do
  if (const auto* plan = std::get_if<PlanArrived>(&event)) id_ = plan->plan.micro_batch;
  events.push_back(std::move(event));
  while (!events.empty() || !frames.empty()) {
    if (events.empty()) {
      events.push_back(std::move(frames.front()));
      frames.pop_front();
    }
    std::vector<Action> actions;
    core_.Handle(std::move(events.front()), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    events.pop_front();
    for (const Action& action : actions) Perform(action, events, frames, sent);
  }
  return sent;
}

void FakeRank::Perform(const Action& action, std::deque<Event>& events, std::deque<Event>& frames,
                       std::vector<ToRank>& sent) {
  const auto to = [&](const proto::RankAddress& address, Event event) {
    sent.push_back({static_cast<int>(address.worker.value()), std::move(event)});
  };
  if (std::holds_alternative<RunDense>(action)) events.push_back(DenseDone{id_});
  if (const auto* attend = std::get_if<AttendPrompts>(&action)) {
    Note(attend->op);
    const bool softmax = core_.table().linear(core_.table().op_group[attend->op]) == nullptr;
    if (AsksRanks() && softmax) op_at_[core_.PlaceOfKeys(id_, attend->op)] = attend->op;
    events.push_back(DenseDone{id_});
  }
  if (const auto* attend = std::get_if<AttendShard>(&action)) {
    const auto rows = core_.RankRows(id_, attend->op, attend->rank);
    shards_.push_back({attend->op, attend->rank, {rows.begin(), rows.end()}});
    events.push_back(DenseDone{id_});
  }
  if (const auto* forward = std::get_if<ForwardRankRows>(&action))
    to(forward->to,
       RankRowsArrived{forward->to.step, forward->to.micro_batch, forward->op, forward->rank,
                       LastRows(forward->rows.bytes, core_.table().softmax(core_.table().op_group[forward->op]),
                                forward->first_row)});
  if (const auto* send = std::get_if<SendRankState>(&action))
    to(send->to, RankStateArrived{send->to.step, send->to.micro_batch, send->op,
                                  StateOf(core_.table(), core_.PlanOf(id_).part.rank, send->op)});
  if (const auto* send = std::get_if<SendRankRows>(&action))
    for (const SendRankRows::Receiver& receiver : send->receivers) {
      const proto::StepEntry& entry = core_.PlanOf(id_).entries[0];
      const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
      to(receiver.to,
         RankRowsArrived{receiver.to.step, receiver.to.micro_batch, send->op, send->rank,
                         RowsOf(core_.table(), send->rank, send->op, entry.ctx_len + receiver.first_row, end)});
    }
  PerformSwitch(action, events, sent);
  PerformPassQ(action, events, sent);
  if (const auto* keep = std::get_if<KeepRankRows>(&action)) {
    const bool kept = keeps && core_.PartToKeepIn(keep->micro_batch, keep->step) != nullptr;
    if (kept) kept_.push_back({keep->op, keep->rank, {keep->rows.bytes.begin(), keep->rows.bytes.end()}});
    events.push_back(RankRowsKept{keep->micro_batch, keep->step, keep->op, keep->rank, kept});
  }
  if (const auto* send = std::get_if<SendRankAttended>(&action))
    to(send->to, RankAttended{send->to.step, send->to.micro_batch, send->op, send->rank});
  if (const auto* send = std::get_if<SendQuery>(&action)) AnswerStates(send->op, frames);
  if (const auto* send = std::get_if<SendKeyValue>(&action)) {
    handed_over_.push_back(send->op);
    AnswerWith(send->op, LayoutOf(send->op).partial_bytes, frames);
  }
  if (std::holds_alternative<Sample>(action)) events.push_back(SampleDone{id_, {core_.PlanOf(id_).step, id_}});
  if (const auto* finish = std::get_if<FinishStep>(&action)) results_.push_back(finish->result);
}

void FakeRank::PerformSwitch(const Action& action, std::deque<Event>& events, std::vector<ToRank>& sent) {
  const auto rank_of = [](const proto::RankAddress& to) { return static_cast<int>(to.worker.value()); };
  if (const auto* send = std::get_if<SendRankHeads>(&action)) {
    const bool needs = LayoutOf(send->op).gather_bytes > 0 || LayoutOf(send->op).before_bytes > 0;
    if (needs) {
      EXPECT_FALSE(core_.PartsOf(id_)[0].partial.empty()) << "it is sent, too";
    }
    for (const SendRankHeads::Receiver& receiver : send->receivers) {
      const proto::RankAddress& to = receiver.to;
      sent.push_back({rank_of(to), RankHeadsArrived{to.step, to.micro_batch, send->op, send->rank,
                                                    HeadsOf(core_.table(), send->op, CutsOf(core_.PlanOf(id_)),
                                                            send->rank, rank_of(to))}});
    }
  }
  if (const auto* attend = std::get_if<AttendHeads>(&action)) {
    const auto rows = core_.RankHeads(id_, attend->op, attend->rank);
    heads_.push_back({attend->op, attend->rank, {rows.begin(), rows.end()}});
    events.push_back(DenseDone{id_});
  }
  if (const auto* send = std::get_if<SendRankOutputs>(&action)) {
    const std::vector<Position> cuts = CutsOf(core_.PlanOf(id_));
    const int to = rank_of(send->to);
    sent.push_back({to, RankOutputsArrived{send->to.step, send->to.micro_batch, send->op, send->rank,
                                           AsksRanks() ? PartialsOf(core_.table(), send->op, cuts, send->rank, to)
                                                       : OutputsOf(core_.table(), send->op, cuts, send->rank, to)}});
  }
  if (const auto* place = std::get_if<PlaceRankOutputs>(&action))
    placed_.push_back({place->op, place->rank, {place->outputs.bytes.begin(), place->outputs.bytes.end()}});
}

bool FakeRank::AsksRanks() const { return core_.PlanOf(id_).entries[0].exchange == proto::PrefixExchange::kPassQ; }

void FakeRank::PerformPassQ(const Action& action, std::deque<Event>& events, std::vector<ToRank>& sent) {
  if (const auto* send = std::get_if<SendRankQueries>(&action))
    for (const SendRankQueries::Receiver& receiver : send->receivers) {
      const int to = static_cast<int>(receiver.to.worker.value());
      std::vector<std::byte> q = QueriesOf(core_.table(), send->op, CutsOf(core_.PlanOf(id_)), send->rank, to);
      const proto::SoftmaxSpec& spec = core_.table().softmax(core_.table().op_group[send->op]);
      EXPECT_EQ(q.size(), static_cast<size_t>(receiver.rows * spec.query_heads * spec.key_dim) * SizeOf(spec.kv));
      sent.push_back(
          {to, RankHeadsArrived{receiver.to.step, receiver.to.micro_batch, send->op, send->rank, std::move(q)}});
    }
  if (const auto* attend = std::get_if<AttendQueries>(&action)) {
    EXPECT_EQ(op_at_[core_.PlaceOfKeys(id_, attend->op)], attend->op) << "its K and V are kept";
    const auto rows = core_.RankHeads(id_, attend->op, attend->rank);
    queries_.push_back({attend->op, attend->rank, {rows.begin(), rows.end()}});
    events.push_back(DenseDone{id_});
  }
}

void FakeRank::Note(int op) {
  ran_.push_back(op);
  std::vector<std::byte>& from = from_.emplace_back();
  if (core_.table().linear(core_.table().op_group[op]) != nullptr) {
    const auto state = core_.RankState(id_, op);
    from.assign(state.begin(), state.end());
    return;
  }
  for (int rank = 0; rank < core_.PlanOf(id_).part.rank; ++rank) {
    const auto rows = core_.RankRows(id_, op, rank);
    from.insert(from.end(), rows.begin(), rows.end());
  }
}

// The attention worker has the state before rank 0 only.
void FakeRank::AnswerStates(int op, std::deque<Event>& frames) {
  const int64_t bytes = LayoutOf(op).before_bytes;
  const bool linear = core_.table().linear(core_.table().op_group[op]) != nullptr;
  EXPECT_EQ(bytes > 0, linear && core_.PlanOf(id_).part.rank == 0 && core_.PlanOf(id_).part.base > 0);
  if (bytes > 0) AnswerWith(op, bytes, frames);
}

void FakeRank::AnswerWith(int op, int64_t bytes, std::deque<Event>& frames) {
  answer_.resize(std::max(answer_.size(), static_cast<size_t>(bytes)));
  frames.push_back(PartialArrived{NodeId(10), kEpoch, core_.PlanOf(id_).step, id_, op,
                                  std::span(answer_).first(static_cast<size_t>(bytes))});
}

const proto::StepLayout& FakeRank::LayoutOf(int op) const {
  return core_.PartsOf(id_)[0].layouts[core_.table().op_group[op].value()];
}

std::vector<Position> RandomCuts(Position base, int ranks, std::mt19937& random) {
  std::vector<Position> cuts = {base};
  for (int r = 1; r < ranks; ++r) cuts.push_back((cuts.back() / 64 + 1 + static_cast<Position>(random() % 3)) * 64);
  cuts.push_back(cuts.back() + 1 + static_cast<Position>(random() % 130));
  return cuts;
}

}  // namespace dovetail::compute
