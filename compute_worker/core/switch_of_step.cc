// The ranks of a prefill group exchange tokens for heads (Ulysses' switch): in each softmax op a rank sends the others
// q, k and v of its tokens, each the heads which that one attends to, attends to its own heads of all tokens of the
// group, one rank's tokens after the other, and sends back what that gave. It goes on to the next op when it has
// attended to all tokens and has all heads of its own. In linear ops (LinearExchange::kSwitch) it does the same with
// the heads' states, and sends back what the tokens leave of these, too: each rank hands over those of its own tokens.
//
// A rank needs nothing in order to send what the others need of an op but to have ended the op before, and it ends no
// op before the others have sent theirs of it. So ranks are at most one op apart, each holds what the others sent of
// two ops at most, and of the ranks that are behind the foremost always finds what it waits for: no two wait for each
// other.
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "proto/pass_q.h"

namespace dovetail::compute {

using proto::StepPlan;

bool ComputeWorkerCore::Switches(const StepPlan& plan) {
  return !plan.ranks.empty() && plan.entries[0].exchange == proto::PrefixExchange::kSwitch;
}

bool ComputeWorkerCore::SwitchesStates(const StepPlan& plan) {
  return !plan.ranks.empty() && plan.entries[0].linear_exchange == proto::LinearExchange::kSwitch;
}

// A worker that has no switch of linear layers hands on their states in its place: the ranks of a switch have one kind
// of device, and the scheduler may not know which.
void ComputeWorkerCore::ChainStates(StepPlan& plan) const {
  if (options_.rank_state_switch || !options_.linear_prompts) return;
  for (proto::StepEntry& entry : plan.entries)
    if (entry.linear_exchange == proto::LinearExchange::kSwitch) entry.linear_exchange = proto::LinearExchange::kChain;
}

// Whether heads are exchanged in this op.
bool ComputeWorkerCore::Switches(const StepPlan& plan, int op) const {
  return table_.linear(table_.op_group[op]) != nullptr ? SwitchesStates(plan) : Switches(plan);
}

proto::SwitchRank ComputeWorkerCore::SwitchRankOf(const StepPlan& plan) const {
  return {.base = plan.part.base,
          .end = plan.part.end,
          .tokens = TokensOfRank(plan, plan.part.rank),
          .rank = plan.part.rank,
          .ranks = plan.part.ranks,
          .partials = options_.head_partials};
}

// K and V lie in memory of their own. Earlier tokens of the segment in which the group begins are gathered by rank 0,
// which gives them to the others, and those before that are asked of the attention workers.
PromptEntry ComputeWorkerCore::BeginPromptOfSwitch(const StepPlan& plan) {
  PromptEntry prompt;
  prompt.switches = true;
  prompt.begin = proto::SwitchBegin(plan.part.base);
  if (plan.part.rank == 0 && prompt.begin < plan.part.base) {
    prompt.gather_begin = prompt.begin;
    prompt.gather_end = plan.part.base;
  }
  return prompt;
}

// What another rank sends of its tokens for the heads that are attended here.
int64_t ComputeWorkerCore::HeadsBytesFrom(const StepPlan& plan, int op, int rank) const {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const proto::TokenRange tokens = TokensOfRank(plan, rank);
  const int heads = proto::HeadsOfRank(spec.kv_heads, plan.part.rank, plan.part.ranks).size();
  if (spec.linear()) return proto::LinearRowsBytes(spec, tokens, rank, heads);
  return proto::HeadRowsBytes(spec, tokens, rank == 0 ? proto::SwitchBegin(plan.part.base) : tokens.begin, heads);
}

// Whether another rank sends so much.
bool ComputeWorkerCore::FitsSwitch(const StepPlan& plan, int op, int rank, size_t bytes) const {
  if (!Switches(plan, op) || rank >= plan.part.ranks || rank == plan.part.rank) return false;
  return static_cast<int64_t>(bytes) == HeadsBytesFrom(plan, op, rank);
}

// The op's own q, k and v are there. A linear op comes here from every event that it waits for.
void ComputeWorkerCore::BeginSwitch(MicroBatch& batch, int op, std::vector<Action>& actions) {
  if (!Switches(batch.plan, op)) return;
  if (batch.heads.op != op) batch.heads = {.op = op};
  SendHeads(batch, actions);
}

// The states before the group have not come from the attention workers.
bool ComputeWorkerCore::AwaitsStates(const MicroBatch& batch, int op) const {
  const uint16_t group = table_.op_group[op].value();
  return std::any_of(batch.parts.begin(), batch.parts.end(),
                     [&](const WorkerPart& part) { return part.awaited && part.layouts[group].before_bytes > 0; });
}

// Once, when what is gathered has come, or the states before the group.
void ComputeWorkerCore::SendHeads(MicroBatch& batch, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  const int op = batch.heads.op;
  if (op < 0 || !Switches(plan, op) || batch.heads.sent || (Gathers(batch, op) && batch.awaiting > 0)) return;
  if (AwaitsStates(batch, op)) return;
  batch.heads.sent = true;
  const LayerGroup group = table_.op_group[op];
  SendRankHeads send{plan.micro_batch, op, plan.part.rank, {}};
  for (int to = 0; to < plan.part.ranks; ++to)
    if (to != plan.part.rank)
      send.receivers.push_back({plan.ranks[static_cast<size_t>(to)],
                                proto::HeadsOfRank(table_.softmax(group).kv_heads, to, plan.part.ranks)});
  actions.push_back(std::move(send));
}

// The rank whose tokens may be attended to now: the next one, for those before are what it sees. -1: none.
int ComputeWorkerCore::HeadsToAttend(const MicroBatch& batch) const {
  if (batch.heads.op < 0 || batch.stage >= program_.size()) return -1;
  const Stage& stage = program_[batch.stage];
  const SwitchProgress& heads = batch.heads;
  const StepPlan& plan = batch.plan;
  const bool linear = table_.linear(table_.op_group[heads.op]) != nullptr;
  if (stage.kind != (linear ? StageKind::kAttendPrompts : StageKind::kAwaitPartials)) return -1;
  if (heads.op != stage.index || heads.attended == plan.part.ranks) return -1;
  if (Gathers(batch, heads.op) && batch.awaiting > 0) return -1;  // the beginning of the first segment
  if (AwaitsStates(batch, heads.op)) return -1;
  const bool there =
      heads.attended == plan.part.rank || !inbox_.Find(plan.micro_batch, heads.op, heads.attended).empty();
  return there ? heads.attended : -1;
}

// Whether there is a rank whose tokens are attended to now.
bool ComputeWorkerCore::AttendsNextHeads(MicroBatch& batch, std::vector<Action>& actions) const {
  const int rank = HeadsToAttend(batch);
  if (rank < 0) return false;
  batch.heads.attending = rank;
  batch.dense_in_flight = true;
  actions.push_back(AttendHeads{batch.plan.micro_batch, batch.heads.op, rank});
  return true;
}

void ComputeWorkerCore::AttendedHeads(MicroBatch& batch, int rank, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  ++batch.heads.attended;
  if (rank == plan.part.rank) return;
  inbox_.Drop(plan.micro_batch, batch.heads.op, rank);
  actions.push_back(
      SendRankOutputs{plan.micro_batch, batch.heads.op, plan.part.rank, plan.ranks[static_cast<size_t>(rank)]});
}

bool ComputeWorkerCore::SwitchIsDone(const MicroBatch& batch) const {
  if (batch.heads.op < 0) return true;
  const uint32_t all = (uint32_t{1} << batch.plan.part.ranks) - 1;
  const uint32_t own = uint32_t{1} << batch.plan.part.rank;
  return batch.heads.attended == batch.plan.part.ranks && (batch.heads.returned | own) == all;
}

int64_t ComputeWorkerCore::SwitchBytesOf(const MicroBatch& batch) const {
  int64_t bytes = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const proto::SoftmaxSpec& spec = table_.views[g];
    if (spec.linear() ? !SwitchesStates(batch.plan) : !Switches(batch.plan)) continue;
    const proto::SwitchRank rank = SwitchRankOf(batch.plan);
    const int64_t of_op = spec.linear() ? proto::LinearSwitchBytesTo(spec, rank) : proto::SwitchBytesTo(spec, rank);
    bytes += table_.ops_in_group[g] * of_op;
  }
  return bytes;
}

// Of a switch, or queries (pass_q_of_step.cc). It may come before the plan of its step.
void ComputeWorkerCore::On(RankHeadsArrived event, std::vector<Action>& actions) {
  const MicroBatchId id = event.micro_batch;
  MicroBatch* const batch = Running(id, event.step);
  bool fits = id.value() < micro_batches_.size() && event.op < table_.op_count() && !event.rows.empty() &&
              event.rank < proto::kMaxPrefillRanks;
  const bool linear = fits && table_.linear(table_.op_group[event.op]) != nullptr;
  if (fits && batch != nullptr)
    fits = FitsSwitch(batch->plan, event.op, event.rank, event.rows.size()) ||
           (!linear && FitsQueries(batch->plan, event.op, event.rank, event.rows.size()));
  if (!fits || !inbox_.Put(id, event.step, event.op, event.rank, std::move(event.rows))) {
    ++counters_.dropped_frames;
    return;
  }
  if (batch != nullptr && !AnswerQueries(*batch, actions)) GoOnWithRanks(*batch, event.op, actions);
}

// What another rank is to give for the step's tokens; -1: nothing, or it has.
int64_t ComputeWorkerCore::OutputBytesOf(const MicroBatch& batch, int op, int rank) const {
  const StepPlan& plan = batch.plan;
  if (batch.aborted || rank >= plan.part.ranks || rank == plan.part.rank) return -1;
  const uint32_t bit = uint32_t{1} << rank;
  const bool linear = table_.linear(table_.op_group[op]) != nullptr;
  if (AsksRanks(plan) && !linear) {
    const bool known = op == batch.pass_q.op && (Holders(plan, op) & ~batch.pass_q.returned & bit) != 0;
    return known ? proto::PassQPartialBytes(table_.softmax(table_.op_group[op]), proto::PassQCuts(plan), plan.part.rank,
                                            rank)
                 : -1;
  }
  if (!Switches(plan, op) || op != batch.heads.op || (batch.heads.returned & bit) != 0) return -1;
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const proto::TokenRange tokens = TokensOfRank(plan, plan.part.rank);
  const int heads = proto::HeadsOfRank(spec.kv_heads, rank, plan.part.ranks).size();
  return linear
             ? proto::LinearOutputBytes(spec, tokens, heads)
             : proto::HeadOutputBytes(spec, tokens, proto::SwitchBegin(plan.part.base), heads, options_.head_partials);
}

// Of the op at hand: the other rank has had this one's q, k and v of it, or q.
void ComputeWorkerCore::On(RankOutputsArrived event, std::vector<Action>& actions) {
  MicroBatch* const batch = Running(event.micro_batch, event.step);
  const int64_t bytes = batch == nullptr ? -1 : OutputBytesOf(*batch, event.op, event.rank);
  if (bytes != static_cast<int64_t>(event.outputs.size())) {
    ++counters_.dropped_frames;
    return;
  }
  (AsksRanks(batch->plan) ? batch->pass_q.returned : batch->heads.returned) |= uint32_t{1} << event.rank;
  actions.push_back(PlaceRankOutputs{event.micro_batch, event.op, event.rank, std::move(event.outputs)});
  GoOnWithRanks(*batch, event.op, actions);
}

}  // namespace dovetail::compute
