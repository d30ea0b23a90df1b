// The ranks of a prefill group ask each other about earlier tokens (pass-Q, in one shot): in each softmax op a rank
// sends its queries to the ranks before it whose tokens they see, those attend to them over their own tokens, and it
// joins what comes back with its own part and with what attention workers hold before the group.
//
// A rank keeps K and V of its tokens until all later ranks that see them have asked and were answered, of at most
// kRankOpsAhead ops. It answers before it does anything else, also when it waits or has drawn its token. So what a rank
// waits for comes: of the ranks that are behind, the foremost asks those that have K and V of that op and are idle or
// at work, and a rank that waits for later ones has sent and kept all that they need. No two wait for each other.
#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/head_switch.h"
#include "proto/pass_q.h"

namespace dovetail::compute {

using proto::StepPlan;

namespace {

uint32_t Bit(int rank) { return uint32_t{1} << rank; }

}  // namespace

bool ComputeWorkerCore::AsksRanks(const StepPlan& plan) {
  return !plan.ranks.empty() && plan.entries[0].exchange == proto::PrefixExchange::kPassQ;
}

// K and V lie in memory of their own. Earlier tokens of the segment in which the group begins are gathered by rank 0,
// which attends to them with its own, and those before that are asked of the attention workers.
PromptEntry ComputeWorkerCore::BeginPromptOfPassQ(const StepPlan& plan) {
  PromptEntry prompt;
  prompt.asks_ranks = true;
  prompt.begin = proto::SwitchBegin(plan.part.base);
  if (plan.part.rank == 0 && prompt.begin < plan.part.base) {
    prompt.gather_begin = prompt.begin;
    prompt.gather_end = plan.part.base;
  }
  return prompt;
}

// The later ranks that ask about the step's own tokens. A bit for each.
uint32_t ComputeWorkerCore::Askers(const StepPlan& plan, int op) const {
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  uint32_t askers = 0;
  for (int rank = plan.part.rank + 1; rank < plan.part.ranks; ++rank)
    if (proto::PassQQueryBytes(table_.softmax(table_.op_group[op]), cuts, rank, plan.part.rank) > 0)
      askers |= Bit(rank);
  return askers;
}

// The earlier ranks that the step asks.
uint32_t ComputeWorkerCore::Holders(const StepPlan& plan, int op) const {
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  uint32_t holders = 0;
  for (int rank = 0; rank < plan.part.rank; ++rank)
    if (proto::PassQQueryBytes(table_.softmax(table_.op_group[op]), cuts, plan.part.rank, rank) > 0)
      holders |= Bit(rank);
  return holders;
}

// Whether a later rank sends so many queries.
bool ComputeWorkerCore::FitsQueries(const StepPlan& plan, int op, int rank, size_t bytes) const {
  if (!AsksRanks(plan) || rank <= plan.part.rank || rank >= plan.part.ranks) return false;
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  return proto::PassQQueryBytes(spec, proto::PassQCuts(plan), rank, plan.part.rank) == static_cast<int64_t>(bytes);
}

// The op's own q is there.
void ComputeWorkerCore::SendQueries(MicroBatch& batch, int op, std::vector<Action>& actions) const {
  const StepPlan& plan = batch.plan;
  if (!AsksRanks(plan) || table_.linear(table_.op_group[op]) != nullptr) return;
  batch.pass_q.op = op;
  batch.pass_q.returned = 0;
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  SendRankQueries send{plan.micro_batch, op, plan.part.rank, {}};
  for (int to = plan.part.rank - 1; to >= 0; --to) {
    const proto::TokenRange rows = proto::PassQQueries(table_.softmax(table_.op_group[op]), cuts, plan.part.rank, to);
    if (rows.begin < rows.end) send.receivers.push_back({plan.ranks[static_cast<size_t>(to)], rows.end - rows.begin});
  }
  if (!send.receivers.empty()) actions.push_back(std::move(send));
}

// The op's own k and v are there. They may be asked about once the step's own tokens have been attended to.
void ComputeWorkerCore::BeginPassQ(MicroBatch& batch, int op) {
  if (table_.linear(table_.op_group[op]) != nullptr) return;
  PassQProgress& pass_q = batch.pass_q;
  uint32_t taken = 0;
  for (const PassQProgress::Kept& kept : pass_q.kept) taken |= Bit(kept.place);
  int place = 0;
  while ((taken & Bit(place)) != 0) ++place;
  pass_q.kept.push_back({op, place});
}

int ComputeWorkerCore::PlaceOfKeys(MicroBatchId id, int op) const {
  for (const PassQProgress::Kept& kept : micro_batches_[id.value()].pass_q.kept)
    if (kept.op == op) return kept.place;
  return 0;
}

// Of the earliest op.
bool ComputeWorkerCore::HasQueries(const MicroBatch& batch, int& op, int& rank) const {
  const StepPlan& plan = batch.plan;
  for (const PassQProgress::Kept& kept : batch.pass_q.kept) {
    if (!kept.attended) break;
    for (int from = plan.part.rank + 1; from < plan.part.ranks; ++from) {
      if ((kept.answered & Bit(from)) != 0 || inbox_.Find(plan.micro_batch, kept.op, from).empty()) continue;
      op = kept.op;
      rank = from;
      return true;
    }
  }
  return false;
}

// True: it has begun to, and DenseDone says when that has ended.
bool ComputeWorkerCore::AnswerQueries(MicroBatch& batch, std::vector<Action>& actions) const {
  int op = 0, rank = 0;
  if (batch.aborted || batch.dense_in_flight || !HasQueries(batch, op, rank)) return false;
  batch.pass_q.attending = {op, rank};
  batch.dense_in_flight = true;
  actions.push_back(AttendQueries{batch.plan.micro_batch, op, rank});
  return true;
}

// AttendQueries has ended; false: it was something else.
bool ComputeWorkerCore::AnsweredQueries(MicroBatch& batch, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  const auto attended = std::exchange(batch.pass_q.attending, std::nullopt);
  if (!attended) return false;
  const auto [op, rank] = *attended;
  inbox_.Drop(plan.micro_batch, op, rank);
  actions.push_back(SendRankOutputs{plan.micro_batch, op, plan.part.rank, plan.ranks[static_cast<size_t>(rank)]});
  for (PassQProgress::Kept& kept : batch.pass_q.kept)
    if (kept.op == op) kept.answered |= Bit(rank);
  DropAnswered(batch);
  if (!batch.done.has_value()) {
    Advance(plan.micro_batch, actions);
  } else if (MayFinish(batch)) {
    Finish(batch, *std::move(batch.done), actions);
  } else {
    AnswerQueries(batch, actions);
  }
  return true;
}

// K and V of ops about which no rank asks any more.
void ComputeWorkerCore::DropAnswered(MicroBatch& batch) const {
  std::erase_if(batch.pass_q.kept, [&](const PassQProgress::Kept& kept) {
    return kept.attended && (Askers(batch.plan, kept.op) & ~kept.answered) == 0;
  });
}

bool ComputeWorkerCore::PassQIsDone(const MicroBatch& batch) const {
  if (!AsksRanks(batch.plan) || batch.pass_q.op < 0) return true;
  return (Holders(batch.plan, batch.pass_q.op) & ~batch.pass_q.returned) == 0;
}

int64_t ComputeWorkerCore::PassQBytesOf(const MicroBatch& batch) const {
  if (!AsksRanks(batch.plan)) return 0;
  const std::vector<Position> cuts = proto::PassQCuts(batch.plan);
  int64_t bytes = 0;
  for (int g = 0; g < table_.group_count(); ++g)
    if (!table_.views[g].linear())
      bytes += table_.ops_in_group[g] * proto::PassQBytesTo(table_.views[g], cuts, batch.plan.part.rank);
  return bytes;
}

}  // namespace dovetail::compute
