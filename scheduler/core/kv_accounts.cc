#include "scheduler/core/kv_accounts.h"

#include <utility>

#include "proto/state_blocks.h"
#include "scheduler/core/tenant_queues.h"

namespace dovetail::scheduler {

Charges KvAccounts::CostOf(const Sequence& sequence, Position end, std::span<const Position> cuts) const {
  Extent extent{.first_block = sequence.shared_blocks, .end = end, .ctx_len = sequence.told_ctx_len};
  if (!cuts.empty()) {
    extent.chunk = static_cast<int>(cuts.back() - cuts.front());
    extent.group_states = proto::StateBlocksHeld(cuts);
  }
  return budget_.CostOf(sequence.placement, extent);
}

void KvAccounts::Charge(Sequence& sequence, const Charges& cost) {
  uint64_t& blocks = sequence.request->tenant->kv_blocks;
  blocks -= TotalBlocks(sequence.charges);
  budget_.Exchange(sequence.charges, cost);
  blocks += TotalBlocks(sequence.charges);
}

void KvAccounts::ChargeShared(RequestState& request, const Charges& cost) {
  request.tenant->kv_blocks -= TotalBlocks(request.shared.charges);
  budget_.Exchange(request.shared.charges, cost);
  request.tenant->kv_blocks += TotalBlocks(request.shared.charges);
}

std::optional<int> KvAccounts::Reserve(Sequence& sequence, Position end) {
  if (end <= sequence.reserved) return std::nullopt;
  const Position target = BlocksOf(end) * kSegmentTokens;
  const Charges cost = CostOf(sequence, target);
  if (const std::optional<int> lacking = budget_.Lacking(cost, sequence.charges)) return lacking;
  Charge(sequence, cost);
  sequence.reserved = target;
  return std::nullopt;
}

bool KvAccounts::ReserveForGroup(Sequence& sequence, std::span<const Position> cuts) {
  const Charges cost = CostOf(sequence, sequence.reserved, cuts);
  if (budget_.Lacking(cost, sequence.charges)) return false;
  Charge(sequence, cost);
  sequence.group_charged = true;
  return true;
}

void KvAccounts::EndGroup(Sequence& sequence) {
  if (std::exchange(sequence.group_charged, false)) Charge(sequence, CostOf(sequence, sequence.reserved));
}

bool KvAccounts::Renew(Sequence& sequence) {
  if (sequence.group_charged) return true;
  const Charges cost = CostOf(sequence, sequence.reserved);
  if (budget_.Lacking(cost, sequence.charges)) return false;
  Charge(sequence, cost);
  return true;
}

void KvAccounts::Share(Sequence& sequence) {
  Charge(sequence, CostOf(sequence, sequence.reserved));
  ChargeShared(*sequence.request, budget_.CostOf(sequence.placement, {.end = sequence.shared_blocks * kSegmentTokens,
                                                                      .ctx_len = sequence.told_ctx_len}));
  sequence.request->shared.users = 1;
  sequence.shares_prefix = true;
}

void KvAccounts::TakeShare(Sequence& sequence) {
  ++sequence.request->shared.users;
  sequence.shares_prefix = true;
}

void KvAccounts::LeaveShare(Sequence& sequence) {
  if (!std::exchange(sequence.shares_prefix, false)) return;
  if (--sequence.request->shared.users == 0) ChargeShared(*sequence.request, {});
}

void KvAccounts::Return(Sequence& sequence) {
  Charge(sequence, {});
  LeaveShare(sequence);
}

bool KvAccounts::HoldsOn(const Sequence& sequence, int worker) {
  return BlocksOn(sequence.charges, worker) > 0 ||
         (sequence.shares_prefix && BlocksOn(sequence.request->shared.charges, worker) > 0);
}

}  // namespace dovetail::scheduler
