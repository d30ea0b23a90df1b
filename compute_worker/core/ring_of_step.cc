// K and V of a softmax op go round the ranks of a prefill group (BurstAttention's ring; forward only, for causal
// attention needs nothing of later tokens). A rank gives the next one its own and hands on those of earlier ranks, and
// attends to one after the other. It goes on to the next op when it has attended to all and sent all. So everything on
// a link is in the order of the ops, and the last rank, which waits for no later one, can always go on: no two ranks
// wait for each other.
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/head_switch.h"

namespace dovetail::compute {

using proto::StepEntry;
using proto::StepPlan;

namespace {

uint32_t Bit(int rank) { return uint32_t{1} << rank; }

// Of MicroBatch::unattended.
int KeyOf(int op, int rank) { return op * proto::kMaxPrefillRanks + rank; }

}  // namespace

bool ComputeWorkerCore::Rings(const StepPlan& plan) {
  return !plan.ranks.empty() && plan.entries[0].exchange == proto::PrefixExchange::kRing;
}

proto::TokenRange ComputeWorkerCore::ShardOf(MicroBatchId id, int rank) const {
  const StepPlan& plan = PlanOf(id);
  const Position begin = plan.ranks[rank].begin / kSegmentTokens * kSegmentTokens;  // rank 0's may lie in a segment
  return {begin, proto::TokensOfRank(plan, rank).end};
}

// The scratch has the step's own tokens, of one op. Earlier ones of the segment in which the group begins are gathered.
// Without room, all is asked of the attention workers, and K and V of the others are handed on all the same.
PromptEntry ComputeWorkerCore::BeginPromptOfRing(const StepPlan& plan) {
  const StepEntry& entry = plan.entries[0];
  scratch_.Drop(entry.sequence);
  PromptEntry prompt;
  prompt.part = scratch_.Begin(entry.sequence, entry.ctx_len, static_cast<int>(entry.tokens.size()), /*more=*/false);
  if (prompt.part == nullptr) return prompt;
  prompt.begin = plan.part.base / kSegmentTokens * kSegmentTokens;
  prompt.from_ranks = prompt.ring = true;
  if (prompt.begin < plan.part.base) {
    prompt.gather_begin = prompt.begin;
    prompt.gather_end = plan.part.base;
  }
  return prompt;
}

// Whose K and V that rank gets, from the one before it.
uint32_t ComputeWorkerCore::ShardsTo(const StepPlan& plan, int op, int rank) const {
  uint32_t shards = 0;
  for (int of = 0; of < rank && rank < plan.part.ranks; ++of) {
    const proto::TokenRange rows = RowsBetween(plan, op, of, rank);
    if (rows.begin < rows.end) shards |= Bit(of);
  }
  return shards;
}

// The op's own k and v are there.
void ComputeWorkerCore::BeginRing(MicroBatch& batch, int op, std::vector<Action>& actions) {
  if (table_.linear(table_.op_group[op]) != nullptr) return;
  batch.ring = {.op = op, .attended = FromRanks(batch) ? 0 : ~uint32_t{0}};
  TendRing(batch, actions);
}

// As many as the next rank takes: its own first, then what has come.
void ComputeWorkerCore::SendShards(MicroBatch& batch, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  RingProgress& ring = batch.ring;
  const int own = plan.part.rank, next = own + 1;
  if (next >= plan.part.ranks) return;
  const uint32_t wanted = ShardsTo(plan, ring.op, next) & ~ring.sent;
  std::vector<int>& there = batch.unattended[static_cast<size_t>(next)];
  const proto::RankAddress& to = plan.ranks[static_cast<size_t>(next)];
  for (int of = own; of >= 0 && there.size() < size_t{kRingShards}; --of) {
    if ((wanted & Bit(of)) == 0) continue;
    const Position first = RowsBetween(plan, ring.op, of, next).begin;
    if (of == own) {
      actions.push_back(SendRankRows{plan.micro_batch, ring.op, own, {{to, first - plan.entries[0].ctx_len}}});
    } else {
      RankTensor rows = inbox_.Share(plan.micro_batch, ring.op, of);
      if (rows.empty()) continue;
      const Position begin = RowsBetween(plan, ring.op, of, own).begin;
      actions.push_back(ForwardRankRows{plan.micro_batch, ring.op, of, std::move(rows), first - begin, to});
    }
    ring.sent |= Bit(of);
    there.push_back(KeyOf(ring.op, of));
  }
}

// Something of the op at hand has come, was attended to, or has room with the next rank: sends what may be sent, and
// lets go of what it needs no more.
void ComputeWorkerCore::TendRing(MicroBatch& batch, std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  const RingProgress& ring = batch.ring;
  if (ring.op < 0 || batch.aborted) return;
  SendShards(batch, actions);
  const uint32_t to_send = ShardsTo(plan, ring.op, plan.part.rank + 1) & ~ring.sent;
  const uint32_t done = ring.attended & ~to_send;
  for (int of = 0; of < plan.part.rank; ++of) {
    if ((done & Bit(of)) == 0 || inbox_.Find(plan.micro_batch, ring.op, of).empty()) continue;
    inbox_.Drop(plan.micro_batch, ring.op, of);
    actions.push_back(
        SendRankAttended{plan.micro_batch, ring.op, of, plan.ranks[static_cast<size_t>(plan.part.rank) - 1]});
  }
}

// The rank whose K and V of the op at hand may be attended to now; -1: none.
int ComputeWorkerCore::ShardToAttend(const MicroBatch& batch) const {
  if (!Rings(batch.plan) || batch.stage >= program_.size()) return -1;
  const RingProgress& ring = batch.ring;
  const Stage& stage = program_[batch.stage];
  if (stage.kind != StageKind::kAwaitPartials || ring.op != stage.index) return -1;
  for (int of = batch.plan.part.rank - 1; of >= 0; --of) {
    if ((ring.attended & Bit(of)) != 0 || inbox_.Find(batch.plan.micro_batch, ring.op, of).empty()) continue;
    if (of == 0 && Gathers(batch, ring.op) && batch.awaiting > 0) continue;  // the beginning of its first segment
    return of;
  }
  return -1;
}

bool ComputeWorkerCore::RingIsDone(const MicroBatch& batch) const {
  const StepPlan& plan = batch.plan;
  const RingProgress& ring = batch.ring;
  if (!Rings(plan) || ring.op < 0) return true;
  if ((ShardsTo(plan, ring.op, plan.part.rank + 1) & ~ring.sent) != 0) return false;
  const uint32_t needed = ShardsTo(plan, ring.op, plan.part.rank);
  for (int of = 0; of < plan.part.rank; ++of) {
    const bool done = (ring.attended & Bit(of)) != 0 && inbox_.Came(plan.micro_batch, ring.op, of);
    if ((needed & Bit(of)) != 0 && !done) return false;
  }
  return true;
}

// False: nothing such is there, or it has been told before.
bool ComputeWorkerCore::TakeFromRing(MicroBatch& batch, const RankAttended& event) {
  const auto next = static_cast<size_t>(batch.plan.part.rank) + 1;
  return next < batch.unattended.size() && event.rank < proto::kMaxPrefillRanks &&
         std::erase(batch.unattended[next], KeyOf(event.op, event.rank)) > 0;
}

}  // namespace dovetail::compute
