#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"
#include "scheduler/core/scheduler_impl.h"

// Who may start, and where.

namespace dovetail::scheduler {

void SchedulerCore::Impl::Admit() {
  if (!budget_.any_usable() || pool_.empty()) return;
  if (admission_held_) return;
  // Nobody overtakes the first of the tenant that was served least: a large request would otherwise wait for ever.
  while (Tenant* tenant = queues_.LeastServed()) {
    if (!AdmitOne(*tenant->waiting.begin()->second)) return;
  }
}

// These workers had no room for it: it begins again, on others if they can hold it.
void SchedulerCore::Impl::GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by) {
  Preempt(sequence);  // before: what it gives back itself changes nothing
  for (const WorkerId worker : refused_by)
    if (Refusal* refusal = sequence.refusals.By(worker, budget_))
      refusal->freed = budget_.workers()[*budget_.IndexOf(worker)].freed;
}

bool SchedulerCore::Impl::AdmitOne(Sequence& sequence) {
  const Tenant& tenant = *sequence.request->tenant;
  const std::optional<PlacementPolicy> policy = placer_.NextPolicy(sequence);
  if (!policy.has_value()) {
    if (sequence.restarted || stranded_.MayFitAgain(sequence.size(), turn_.now())) {
      queues_.Remove(sequence);
      stranded_.Add(sequence, turn_.now());
    } else {
      EndChoice(sequence, FinishReason::kError, TooLarge(sequence));
    }
    return true;
  }
  if (!FreeSlots(tenant, 1 + slots_.PromisedTo(sequence))) return false;
  std::optional<proto::Placement> placement = placer_.Place(sequence, *policy);
  while (!placement.has_value()) {
    if (!FreeBlocksFor(sequence, *policy)) return false;
    placement = placer_.Place(sequence, *policy);
  }
  queues_.Remove(sequence);
  --waiting_;
  sequence.stranded_until = absl::InfiniteFuture();
  if (sequence.request->call != nullptr) sequence.request->call->begun = true;
  slots_.Take(sequence, turn_.now());
  placer_.TakeTurn();
  if (probes_.IsWorthwhile(sequence, *policy)) {
    probes_.Begin(sequence);
  } else {
    Open(sequence, *std::move(placement));
  }
  return true;
}

absl::Status SchedulerCore::Impl::TooLarge(const Sequence& sequence) const {
  return absl::OutOfRangeError(absl::StrCat("kv cache: the attention workers hold ", placer_.LongestSequence(),
                                            " tokens of one sequence, and this one has ", sequence.size(),
                                            "; shorten the prompt or give them more memory"));
}

// Makes room for `needed` sequences of `tenant`: at the cost of those whose reader is slow, then of a tenant that has
// more than its part of the slots while this one has less.
bool SchedulerCore::Impl::FreeSlots(const Tenant& tenant, int needed) {
  while (!slots_.Has(needed)) {
    if (PreemptPaused(std::nullopt)) continue;
    const int fair = std::max(1, options_.max_num_seqs / queues_.tenant_count());
    if (tenant.slots + needed > fair) return false;
    Sequence* victim = slots_.PickVictim(std::nullopt, [&](const Tenant& other) {
      return &other != &tenant && other.slots > fair && other.served > tenant.served;
    });
    if (victim == nullptr) return false;
    Preempt(*victim);
  }
  return true;
}

// The same for KV blocks, on the worker where they lack.
bool SchedulerCore::Impl::FreeBlocksFor(const Sequence& sequence, PlacementPolicy policy) {
  const Tenant& tenant = *sequence.request->tenant;
  const std::vector<proto::Placement> candidates = placer_.Possible(sequence, policy);
  const Charges cost = budget_.CostOf(candidates.front(), {.end = sequence.size() + kSegmentTokens});
  std::optional<int> lacking = placer_.LacksRoomOn(sequence, candidates.front());
  if (!lacking.has_value()) lacking = budget_.Lacking(cost, {}, kAdmissionSpare);
  if (!lacking.has_value()) return false;
  if (PreemptPaused(lacking)) return true;
  const uint64_t fair = budget_.capacity() / static_cast<uint64_t>(queues_.tenant_count());
  if (tenant.kv_blocks + TotalBlocks(cost) > fair) return false;
  Sequence* victim = slots_.PickVictim(lacking, [&](const Tenant& other) {
    return &other != &tenant && other.kv_blocks > fair && other.served > tenant.served;
  });
  if (victim == nullptr) return false;
  Preempt(*victim);
  return true;
}

bool SchedulerCore::Impl::PreemptPaused(std::optional<int> worker) {
  Sequence* const newest = paused_ == 0 ? nullptr : slots_.PickPaused(worker);
  if (newest == nullptr) return false;
  Preempt(*newest);
  return true;
}

void SchedulerCore::Impl::On(const PrefixProbed& event) {
  if (Sequence* complete = probes_.Take(event)) PlaceProbed(*complete);
}

void SchedulerCore::Impl::PlaceProbed(Sequence& sequence) {
  sequence.probed = true;
  if (std::optional<proto::Placement> placement = placer_.Place(sequence, PlacementPolicy::kRequest)) {
    Open(sequence, *std::move(placement));
    probes_.End(sequence);  // after Open: what was opened is kept by the sequence, not by the pin
    sequence.probed = false;
    sequence.hits.clear();
  } else {
    probes_.End(sequence);
    slots_.GiveBack(sequence);
    Wait(sequence);
  }
}

void SchedulerCore::Impl::ExpireProbes() {
  while (Sequence* sequence = probes_.Expired()) PlaceProbed(*sequence);
}

}  // namespace dovetail::scheduler
