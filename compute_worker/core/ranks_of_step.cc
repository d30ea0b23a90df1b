// What a step exchanges with the other ranks of its prefill group: the states of linear layers, each with the next
// rank, and K and V of softmax layers, with all later ranks. Dependencies go to later ranks only, but for
// kRankOpsAhead: a rank that waits there has sent what those before it need, so no two ranks wait for each other. What
// goes to earlier ranks, which none waits for, is in rows_given_back.cc.
#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "proto/prefix_traffic.h"

namespace dovetail::compute {

using proto::StepEntry;
using proto::StepPlan;

namespace {

bool GathersFromRanks(const StepPlan& plan) {
  return !plan.ranks.empty() && plan.entries[0].exchange == proto::PrefixExchange::kGatherDirect;
}

}  // namespace

absl::Status ComputeWorkerCore::CheckExchange(const StepPlan& plan, const StepEntry& entry) const {
  const bool chained = entry.linear_exchange == proto::LinearExchange::kChain;
  const bool gathers =
      entry.exchange == proto::PrefixExchange::kGatherDirect || entry.exchange == proto::PrefixExchange::kRing;
  if (chained && !(options_.linear_prompts && table_.has_linear()))
    return InvalidArgument("sequence ", entry.sequence.value(),
                           ": this worker runs no linear layers of prompts, whose states ranks would hand on (chain)");
  if (gathers && !options_.rank_rows)
    return InvalidArgument("sequence ", entry.sequence.value(),
                           ": this worker exchanges no K and V of prompts with other compute workers (",
                           NameOf(entry.exchange), "); on a GPU that needs --prompt-scratch SIZE");
  if (entry.exchange == proto::PrefixExchange::kRing && !options_.rank_ring)
    return InvalidArgument("sequence ", entry.sequence.value(),
                           ": this worker passes on no K and V of other ranks (ring); take gather-direct");
  const bool switches = entry.exchange == proto::PrefixExchange::kSwitch && options_.rank_switch;
  if (const int most = proto::MostSwitchRanks(table_); switches && most > 0 && plan.part.ranks > most)
    return InvalidArgument("sequence ", entry.sequence.value(), ": ", plan.part.ranks, " ranks divide ", most,
                           " KV heads among each other (switch); take at most ", most, " ranks, or gather-direct");
  const bool switched =
      entry.linear_exchange == proto::LinearExchange::kSwitch && switches && options_.rank_state_switch;
  if (const int most = proto::MostLinearSwitchRanks(table_); switched && plan.part.ranks > most)
    return InvalidArgument("sequence ", entry.sequence.value(), ": ", plan.part.ranks, " ranks divide ", most,
                           " heads of linear layers among each other (switch); take at most ", most,
                           " ranks, or chain");
  const bool asks = entry.exchange == proto::PrefixExchange::kPassQ;
  if (asks && !options_.rank_queries)
    return InvalidArgument("sequence ", entry.sequence.value(),
                           ": compute workers on CPUs only ask each other about earlier tokens (pass-q); take "
                           "gather-direct");
  for (const auto& [missing, name] :
       {std::pair(IsBetweenRanks(entry.exchange) && !gathers && !switches && !asks, NameOf(entry.exchange)),
        std::pair(IsBetweenRanks(entry.linear_exchange) && !chained && !switched, NameOf(entry.linear_exchange))})
    if (missing)
      return InvalidArgument("sequence ", entry.sequence.value(), ": this worker has no exchange by ", name,
                             " with other compute workers");
  return absl::OkStatus();
}

// A rank begins where a block does, so the state before it is that of a full block. 0: the op has no state.
int64_t ComputeWorkerCore::RankStateBytes(int op) const {
  const LayerGroup group = table_.op_group[op];
  if (table_.linear(group) == nullptr) return 0;
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return spec.kv_heads * spec.state_bytes;
}

proto::TokenRange ComputeWorkerCore::RowsBetween(const StepPlan& plan, int op, int from, int to) const {
  const bool last = from + 1 == plan.part.ranks;
  const proto::TokenRange tokens{plan.ranks[from].begin, last ? plan.part.end : plan.ranks[from + 1].begin};
  const Position needed_from = to > from ? plan.ranks[to].begin : plan.part.end;  // an earlier rank's next group
  return proto::RowsForLaterRank(tokens, needed_from, table_.softmax(table_.op_group[op]).window);
}

proto::TokenRange ComputeWorkerCore::RowsFrom(MicroBatchId id, int op, int rank) const {
  const StepPlan& plan = PlanOf(id);
  return RowsBetween(plan, op, rank, plan.part.rank);
}

// That the step's own rank gets from that one.
int64_t ComputeWorkerCore::RankRowsBytes(const StepPlan& plan, int op, int rank) const {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  if (spec.linear()) return 0;
  const proto::TokenRange rows = RowsBetween(plan, op, rank, plan.part.rank);
  return (rows.end - rows.begin) * spec.kv_heads * (spec.key_dim + spec.value_dim) *
         static_cast<int64_t>(SizeOf(spec.kv));
}

bool ComputeWorkerCore::FromRanks(const MicroBatch& batch) {
  return std::any_of(batch.prompts.begin(), batch.prompts.end(),
                     [](const PromptEntry& prompt) { return prompt.from_ranks; });
}

bool ComputeWorkerCore::AwaitsRank(const MicroBatch& batch, int op) const {
  const MicroBatchId id = batch.plan.micro_batch;
  if (table_.linear(table_.op_group[op]) != nullptr) {
    const bool chained =
        std::any_of(batch.states.begin(), batch.states.end(), [](const StateEntry& state) { return state.chained; });
    return chained && inbox_.Find(id, op, kChainRank).empty();
  }
  if (!FromRanks(batch) || Rings(batch.plan)) return false;
  for (int rank = 0; rank < batch.plan.part.rank; ++rank)
    if (RankRowsBytes(batch.plan, op, rank) > 0 && inbox_.Find(id, op, rank).empty()) return true;
  return false;
}

bool ComputeWorkerCore::IsAhead(const MicroBatch& batch) const {
  return batch.pass_q.kept.size() >= size_t{kRankOpsAhead} ||
         std::any_of(batch.unattended.begin(), batch.unattended.end(),
                     [](const std::vector<int>& ops) { return ops.size() >= size_t{kRankOpsAhead}; });
}

// All attention workers have answered, for the next step relies on what this one appended. And a rank without room has
// had all rows that come to it: their senders wait to hear that they are not kept. What was given back is in its place.
// Later ranks have asked about all that they will.
bool ComputeWorkerCore::MayFinish(const MicroBatch& batch) const {
  const bool answered = std::all_of(batch.parts.begin(), batch.parts.end(),
                                    [](const WorkerPart& part) { return part.unanswered.empty(); });
  if (!answered || !batch.pass_q.kept.empty() || batch.pass_q.attending) return false;
  if (!GathersFromRanks(batch.plan)) return true;
  for (int op = 0; op < table_.op_count(); ++op)
    for (int rank = 0; rank < batch.plan.part.rank; ++rank)
      if (RankRowsBytes(batch.plan, op, rank) > 0 && !inbox_.Came(batch.plan.micro_batch, op, rank)) return false;
  if (!GivesBack(batch.plan)) return true;
  return std::all_of(batch.unattended.begin(), batch.unattended.begin() + batch.plan.part.rank,
                     [](const std::vector<int>& ops) { return ops.empty(); });
}

// What has come before the plan is looked at now.
void ComputeWorkerCore::BeginRanks(MicroBatch& batch, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  batch.unattended.clear();
  if (plan.ranks.empty()) return;
  batch.unattended.resize(static_cast<size_t>(plan.part.ranks));
  inbox_.Begin(plan.micro_batch, plan.step);
  for (const auto& [op, rank] : inbox_.kept(plan.micro_batch)) {
    if (table_.linear(table_.op_group[op]) != nullptr) {
      const auto bytes = static_cast<int64_t>(inbox_.Find(plan.micro_batch, op, rank).size());
      const bool state = !SwitchesStates(plan) && rank == kChainRank && bytes == RankStateBytes(op);
      if (state || FitsSwitch(plan, op, rank, static_cast<size_t>(bytes))) continue;
      inbox_.Forget(plan.micro_batch, op, rank);
      ++counters_.dropped_frames;
      continue;
    }
    if (IsOfLaterRank(batch, plan.step, rank)) {
      RankTensor rows = inbox_.Share(plan.micro_batch, op, rank);
      inbox_.Forget(plan.micro_batch, op, rank);
      if (!TakeFromLaterRank(batch, op, rank, std::move(rows), actions)) ++counters_.dropped_frames;
      continue;
    }
    const size_t bytes = inbox_.Find(plan.micro_batch, op, rank).size();
    const bool rows = (GathersFromRanks(plan) || Rings(plan)) && rank < plan.part.rank &&
                      RankRowsBytes(plan, op, rank) == static_cast<int64_t>(bytes);
    const bool fits = rows || FitsSwitch(plan, op, rank, bytes) || FitsQueries(plan, op, rank, bytes);
    if (!fits) {
      inbox_.Forget(plan.micro_batch, op, rank);
      ++counters_.dropped_frames;
    } else if (!FromRanks(batch) && GathersFromRanks(plan)) {
      PassOver(batch, op, rank, actions);
    }
  }
}

// The prompt is attended elsewhere, for which there was no room here.
void ComputeWorkerCore::PassOver(const MicroBatch& batch, int op, int rank, std::vector<Action>& actions) {
  inbox_.Drop(batch.plan.micro_batch, op, rank);
  actions.push_back(
      SendRankAttended{batch.plan.micro_batch, op, batch.plan.part.rank, batch.plan.ranks[static_cast<size_t>(rank)]});
}

void ComputeWorkerCore::SendToRanks(MicroBatch& batch, int op, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  if (Rings(plan)) return BeginRing(batch, op, actions);
  if (Switches(plan)) return BeginSwitch(batch, op, actions);
  if (AsksRanks(plan)) return BeginPassQ(batch, op);
  if (!GathersFromRanks(plan) || table_.linear(table_.op_group[op]) != nullptr) return;
  SendRankRows send{plan.micro_batch, op, plan.part.rank, {}};
  // Those that wait for them first.
  const int own = plan.part.rank, others = GivesBack(plan) ? plan.part.ranks - 1 : plan.part.ranks - 1 - own;
  for (int i = 0; i < others; ++i) {
    const int to = (own + 1 + i) % plan.part.ranks;
    const proto::TokenRange rows = RowsBetween(plan, op, plan.part.rank, to);
    if (rows.begin >= rows.end) continue;
    send.receivers.push_back({plan.ranks[static_cast<size_t>(to)], rows.begin - plan.entries[0].ctx_len});
    batch.unattended[static_cast<size_t>(to)].push_back(op);
  }
  if (!send.receivers.empty()) actions.push_back(std::move(send));
}

// The op's prompts have been attended to, or its linear layers run.
void ComputeWorkerCore::AttendedToRanks(MicroBatch& batch, int op, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  if (table_.linear(table_.op_group[op]) != nullptr) {
    for (const StateEntry& state : batch.states)
      if (state.passed_on)
        actions.push_back(SendRankState{plan.micro_batch, op, plan.ranks[plan.part.rank + size_t{1}]});
    return;
  }
  if (AsksRanks(plan)) {
    batch.pass_q.kept.back().attended = true;
    return DropAnswered(batch);
  }
  for (int rank = 0; FromRanks(batch) && !Rings(plan) && rank < plan.part.rank; ++rank)
    if (RankRowsBytes(plan, op, rank) > 0) PassOver(batch, op, rank, actions);
}

// Something has come that the op may wait for.
void ComputeWorkerCore::GoOnWithRanks(MicroBatch& batch, int op, std::vector<Action>& actions) {
  if (batch.aborted || batch.dense_in_flight || batch.stage >= program_.size()) return;
  const Stage& stage = program_[batch.stage];
  const bool attends = stage.kind == StageKind::kAttendPrompts && stage.index == op && !AwaitsWhatItAttends(batch, op);
  const bool goes_on = stage.kind == StageKind::kAwaitPartials && MayAdvance(batch);
  if (attends || goes_on) Advance(batch.plan.micro_batch, actions);
}

// It may come before the plan of its step, which then begins with it.
void ComputeWorkerCore::On(RankStateArrived event, std::vector<Action>& actions) {
  const MicroBatchId id = event.micro_batch;
  const MicroBatch* const begun = Running(id, event.step);
  const bool fits = id.value() < micro_batches_.size() && event.op < table_.op_count() && !event.state.empty() &&
                    static_cast<int64_t>(event.state.size()) == RankStateBytes(event.op) &&
                    (begun == nullptr || !SwitchesStates(begun->plan));
  if (!fits || !inbox_.Put(id, event.step, event.op, kChainRank, std::move(event.state))) {
    ++counters_.dropped_frames;
    return;
  }
  if (MicroBatch* const batch = Running(id, event.step)) GoOnWithRanks(*batch, event.op, actions);
}

void ComputeWorkerCore::On(RankRowsArrived event, std::vector<Action>& actions) {
  const MicroBatchId id = event.micro_batch;
  MicroBatch* const batch = Running(id, event.step);
  if (id.value() < micro_batches_.size() && event.op < table_.op_count() &&
      IsOfLaterRank(micro_batches_[id.value()], event.step, event.rank)) {
    if (!TakeFromLaterRank(micro_batches_[id.value()], event.op, event.rank, std::move(event.rows), actions))
      ++counters_.dropped_frames;
    return;
  }
  bool fits = id.value() < micro_batches_.size() && event.op < table_.op_count() && !event.rows.empty() &&
              table_.linear(table_.op_group[event.op]) == nullptr && event.rank < proto::kMaxPrefillRanks;
  if (fits && batch != nullptr)
    fits = (GathersFromRanks(batch->plan) || Rings(batch->plan)) && event.rank < batch->plan.part.rank &&
           RankRowsBytes(batch->plan, event.op, event.rank) == static_cast<int64_t>(event.rows.size());
  if (!fits || !inbox_.Put(id, event.step, event.op, event.rank, std::move(event.rows))) {
    ++counters_.dropped_frames;
    return;
  }
  if (batch == nullptr) return;
  if (Rings(batch->plan)) {
    TendRing(*batch, actions);
    return GoOnWithRanks(*batch, event.op, actions);
  }
  if (!FromRanks(*batch)) {
    PassOver(*batch, event.op, event.rank, actions);
    if (batch->done.has_value() && MayFinish(*batch)) Finish(*batch, *std::move(batch->done), actions);
    return;
  }
  GoOnWithRanks(*batch, event.op, actions);
}

void ComputeWorkerCore::On(RankAttended event, std::vector<Action>& actions) {
  MicroBatch* const batch = Running(event.micro_batch, event.step);
  const bool ring = batch != nullptr && Rings(batch->plan);
  const bool known = ring ? TakeFromRing(*batch, event)
                          : batch != nullptr && static_cast<size_t>(event.rank) < batch->unattended.size() &&
                                std::erase(batch->unattended[static_cast<size_t>(event.rank)], event.op) > 0;
  if (!known) {
    ++counters_.dropped_frames;
    return;
  }
  if (ring) TendRing(*batch, actions);
  if (batch->done.has_value()) {
    if (MayFinish(*batch)) Finish(*batch, *std::move(batch->done), actions);
    return;
  }
  GoOnWithRanks(*batch, event.op, actions);
}

}  // namespace dovetail::compute
