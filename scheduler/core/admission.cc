#include "scheduler/core/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

void Admission::Admit() {
  if (!budget().any_usable() || pool_.empty() || held_) return;
  // Nothing overtakes the first of the tenant that was served least: a large request would otherwise wait for ever.
  while (Tenant* tenant = queues_.LeastServed()) {
    if (!AdmitOne(*tenant->waiting.begin()->second)) return;
  }
}

bool Admission::AdmitOne(Sequence& sequence) {
  const Tenant& tenant = *sequence.request->tenant;
  const std::optional<PlacementPolicy> policy = placer_.NextPolicy(sequence);
  if (!policy.has_value()) {
    if (sequence.restarted || stranded_.MayFitAgain(sequence.size(), turn_.now())) {
      choices_.Strand(sequence);
    } else {
      choices_.End(sequence, FinishReason::kError, TooLarge(sequence));
    }
    return true;
  }
  if (!FreeSlots(tenant, 1 + slots_.PromisedTo(sequence))) return false;
  std::optional<proto::Placement> placement = placer_.Place(sequence, *policy);
  while (!placement.has_value()) {
    if (!FreeBlocksFor(sequence, *policy)) return false;
    placement = placer_.Place(sequence, *policy);
  }
  choices_.EndWait(sequence);
  sequence.stranded_until = absl::InfiniteFuture();
  if (sequence.request->call != nullptr) sequence.request->call->begun = true;
  slots_.Take(sequence, turn_.now());
  placer_.TakeTurn();
  if (probes_.IsWorthwhile(sequence, *policy)) {
    probes_.Begin(sequence);
  } else {
    incarnations_.Open(sequence, *placement);
  }
  return true;
}

absl::Status Admission::TooLarge(const Sequence& sequence) const {
  return absl::OutOfRangeError(absl::StrCat("kv cache: the attention workers hold ", placer_.LongestSequence(),
                                            " tokens of one sequence, and this one has ", sequence.size(),
                                            "; shorten the prompt or give them more memory"));
}

// Makes room for `needed` sequences of `tenant`: at the cost of those whose reader is slow, then of a tenant that has
// more than its part of the slots while this one has less.
bool Admission::FreeSlots(const Tenant& tenant, int needed) {
  while (!slots_.Has(needed)) {
    if (PreemptPaused(std::nullopt)) continue;
    const int fair = std::max(1, options_.max_num_seqs / queues_.tenant_count());
    if (tenant.slots + needed > fair) return false;
    Sequence* victim = slots_.PickVictim(std::nullopt, [&](const Tenant& other) {
      return &other != &tenant && other.slots > fair && other.served > tenant.served;
    });
    if (victim == nullptr) return false;
    choices_.Preempt(*victim);
  }
  return true;
}

// The same for KV blocks, on the worker where they lack.
bool Admission::FreeBlocksFor(const Sequence& sequence, PlacementPolicy policy) {
  const Tenant& tenant = *sequence.request->tenant;
  const std::vector<proto::Placement> candidates = placer_.Possible(sequence, policy);
  const Charges cost = budget().CostOf(candidates.front(), {.end = sequence.size() + kSegmentTokens});
  std::optional<int> lacking = placer_.LacksRoomOn(sequence, candidates.front());
  if (!lacking.has_value()) lacking = budget().Lacking(cost, {}, kAdmissionSpare);
  if (!lacking.has_value()) return false;
  if (PreemptPaused(lacking)) return true;
  const uint64_t fair = budget().capacity() / static_cast<uint64_t>(queues_.tenant_count());
  if (tenant.kv_blocks + TotalBlocks(cost) > fair) return false;
  Sequence* victim = slots_.PickVictim(lacking, [&](const Tenant& other) {
    return &other != &tenant && other.kv_blocks > fair && other.served > tenant.served;
  });
  if (victim == nullptr) return false;
  choices_.Preempt(*victim);
  return true;
}

bool Admission::PreemptPaused(std::optional<int> worker) {
  Sequence* const newest = choices_.paused() == 0 ? nullptr : slots_.PickPaused(worker);
  if (newest == nullptr) return false;
  choices_.Preempt(*newest);
  return true;
}

void Admission::On(const PrefixProbed& event) {
  if (Sequence* const complete = probes_.Take(event)) PlaceProbed(*complete);
}

void Admission::LoseProbesOf(int worker) {
  for (Sequence* sequence : probes_.Lose(worker)) PlaceProbed(*sequence);
}

void Admission::PlaceProbed(Sequence& sequence) {
  sequence.probed = true;
  const bool tiers = options_.placement == PlacementPolicy::kTiers;
  const PlacementPolicy policy = tiers ? PlacementPolicy::kTiers : PlacementPolicy::kRequest;
  if (std::optional<proto::Placement> placement = placer_.Place(sequence, policy)) {
    if (auto elsewhere = fetch_.OpenElsewhere(sequence, *placement)) placement = *std::move(elsewhere);
    incarnations_.Open(sequence, *placement);
    probes_.End(sequence);  // after Open: what was opened is kept by the sequence, not by the pin
    sequence.probed = false;
    sequence.hits.clear();
  } else {
    probes_.End(sequence);
    slots_.GiveBack(sequence);
    choices_.Wait(sequence);
  }
}

void Admission::On(const SequenceOpened& event) {
  Sequence* const complete = incarnations_.Take(event);
  if (complete == nullptr) return;
  Sequence& sequence = *complete;
  const bool refused = !sequence.refused.empty();
  if (sequence.phase == Phase::kMoving)
    return refused ? choices_.GoElsewhere(sequence, sequence.refused) : moves_.Send(sequence);
  if (sequence.phase == Phase::kOpening) {
    if (refused) return RefusedToOpen(sequence);
    incarnations_.Start(sequence);
    return fetch_.Begin(sequence);
  }

  const auto wanted = static_cast<uint32_t>(sequence.ctx_len / kSegmentTokens);
  const auto& starts = sequence.resumable;
  if (!refused && std::find(starts.begin(), starts.end(), wanted) != starts.end()) {
    incarnations_.MakeReady(sequence);
  } else {
    choices_.Preempt(sequence);  // the fork failed somewhere: on its own, then
  }
  Choices::FinishForks(*sequence.request);
}

// An attention worker does not know the sequence, so no step may name it.
void Admission::RefusedToOpen(Sequence& sequence) {
  for (const WorkerId worker : sequence.refused) {
    Refusal* const refusal = sequence.refusals.By(worker, budget());
    if (refusal == nullptr || ++refusal->opens < kMostRefusedOpens) continue;
    return choices_.EndAll(*sequence.request, FinishReason::kError,
                           absl::UnavailableError(absl::StrCat("attention worker ", worker.value(),
                                                               " refused to open this request's sequence ",
                                                               kMostRefusedOpens, " times; its log may say why")));
  }
  choices_.GoElsewhere(sequence, sequence.refused);
}

void Admission::ExpireProbes() {
  while (Sequence* const sequence = probes_.Expired()) PlaceProbed(*sequence);
}

void Admission::ExpireStranded() {
  for (Sequence* sequence : stranded_.Expired(turn_.now())) {
    const Position longest = placer_.LongestSequence();
    const std::string left =
        sequence->size() <= longest
            ? "have no room for it"
            : absl::StrCat("hold ", longest, " tokens of one sequence, not its ", sequence->size());
    choices_.End(
        *sequence, FinishReason::kError,
        absl::UnavailableError(absl::StrCat("kv cache: an attention worker that could hold this request was lost, "
                                            "and those that are left ",
                                            left, "; try again later")));
  }
}

}  // namespace dovetail::scheduler
