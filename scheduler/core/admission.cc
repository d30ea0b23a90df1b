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

Position SchedulerCore::Impl::MostTokens(const Sequence& sequence) const {
  return std::min<Position>(sequence.prompt_size() + sequence.params().max_tokens, options_.max_model_len);
}

std::optional<int> SchedulerCore::Impl::OnlyAttentionWorker(const Sequence& sequence) const {
  if (!sequence.params().only_attention_worker) return std::nullopt;
  const std::optional<int> index = budget_.IndexOf(*sequence.params().only_attention_worker);
  return index && budget_.workers()[*index].usable() ? index : std::nullopt;
}

std::vector<proto::Placement> SchedulerCore::Impl::Candidates(const Sequence& sequence, PlacementPolicy policy,
                                                              const std::vector<KvBudget::Worker>& workers) const {
  if (const std::optional<int> only = OnlyAttentionWorker(sequence))
    return {proto::WholePlacement(options_.attention, workers[*only].id, workers[*only].epoch)};
  return PlacementsOf(policy, MostTokens(sequence), sequence.hits, workers);
}

std::vector<proto::Placement> SchedulerCore::Impl::PlacementsOf(PlacementPolicy policy, Position most_tokens,
                                                                const std::vector<uint32_t>& hits,
                                                                const std::vector<KvBudget::Worker>& workers) const {
  const std::vector<int> order = EmptiestFirst(workers);
  if (order.empty()) return {};
  if (policy == PlacementPolicy::kHeads) return {SplitHeads(options_.attention, workers, order)};
  if (policy == PlacementPolicy::kTokens)
    return {SplitTokens(options_.attention, workers, order, options_.token_shard_tokens, most_tokens)};
  std::vector<proto::Placement> candidates;
  for (int worker : PreferredForWhole(workers, hits))
    candidates.push_back(proto::WholePlacement(options_.attention, workers[worker].id, workers[worker].epoch));
  return candidates;
}

// Those that can hold it at all, on workers that do not refuse it if there are any; first those that can hold it until
// it ends.
std::vector<proto::Placement> SchedulerCore::Impl::Possible(const Sequence& sequence, PlacementPolicy policy) const {
  std::vector<proto::Placement> possible;
  if (!sequence.refusals.empty())
    possible = ThatHold(Candidates(sequence, policy, NotRefusing(sequence)), sequence.size());
  if (possible.empty()) {
    std::vector<proto::Placement> candidates = Candidates(sequence, policy, budget_.workers());
    possible = ThatHold(candidates, sequence.size());
    if (possible.empty()) return candidates;
  }
  std::stable_partition(possible.begin(), possible.end(), [&](const proto::Placement& placement) {
    return budget_.FitsEmpty(budget_.CostOf(placement, {.end = MostTokens(sequence)}));
  });
  return possible;
}

std::vector<proto::Placement> SchedulerCore::Impl::ThatHold(std::vector<proto::Placement> candidates,
                                                            Position tokens) const {
  std::erase_if(candidates, [&](const proto::Placement& placement) {
    return !budget_.FitsEmpty(budget_.CostOf(placement, {.end = tokens}));
  });
  return candidates;
}

// Where workers do not refuse it, if that can be.
std::optional<PlacementPolicy> SchedulerCore::Impl::NextPolicy(const Sequence& sequence) const {
  if (!sequence.refusals.empty())
    if (const auto policy = PolicyThatFits(sequence, NotRefusing(sequence))) return policy;
  return PolicyThatFits(sequence, budget_.workers());
}

std::optional<PlacementPolicy> SchedulerCore::Impl::PolicyThatFits(const Sequence& sequence,
                                                                   std::vector<KvBudget::Worker> workers) const {
  for (KvBudget::Worker& worker : workers) worker.used = 0;
  for (uint64_t turn = placement_turn_; turn < placement_turn_ + 3; ++turn) {
    const PlacementPolicy policy = PolicyOfTurn(options_.placement, turn);
    if (!ThatHold(Candidates(sequence, policy, workers), sequence.size()).empty()) return policy;
  }
  return std::nullopt;
}

// These workers had no room for it: it begins again, on others if they can hold it.
void SchedulerCore::Impl::GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by) {
  Preempt(sequence);  // before: what it gives back itself changes nothing
  for (const WorkerId worker : refused_by)
    if (Refusal* refusal = RefusalBy(sequence, worker))
      refusal->freed = budget_.workers()[*budget_.IndexOf(worker)].freed;
}

// What is remembered of this worker as it is now. Null: it is not there.
Refusal* SchedulerCore::Impl::RefusalBy(Sequence& sequence, WorkerId worker) const {
  const std::optional<int> index = budget_.IndexOf(worker);
  if (!index) return nullptr;
  const Epoch epoch = budget_.workers()[*index].epoch;
  auto& refusals = sequence.refusals;
  auto* at = std::find_if(refusals.begin(), refusals.end(), [&](const Refusal& r) { return r.worker == worker; });
  if (at == refusals.end()) at = &refusals.emplace_back();
  if (at->worker != worker || at->epoch != epoch) *at = {.worker = worker, .epoch = epoch};
  return at;
}

const Refusal* SchedulerCore::Impl::FindRefusal(const Sequence& sequence, int worker) const {
  const KvBudget::Worker& now = budget_.workers()[worker];
  const auto& refusals = sequence.refusals;
  const auto* at = std::find_if(refusals.begin(), refusals.end(), [&](const Refusal& refusal) {
    return refusal.worker == now.id && refusal.epoch == now.epoch;
  });
  return at == refusals.end() ? nullptr : at;
}

// It had no room, and nothing has changed there since.
bool SchedulerCore::Impl::HasNoRoomFor(const Sequence& sequence, int worker) const {
  const Refusal* const refusal = FindRefusal(sequence, worker);
  return refusal != nullptr && (refusal->alone || refusal->freed == budget_.workers()[worker].freed);
}

bool SchedulerCore::Impl::Refuses(const Sequence& sequence, int worker) const {
  const Refusal* const refusal = FindRefusal(sequence, worker);
  return refusal != nullptr && (refusal->damaged || HasNoRoomFor(sequence, worker));
}

std::vector<KvBudget::Worker> SchedulerCore::Impl::NotRefusing(const Sequence& sequence) const {
  std::vector<KvBudget::Worker> workers = budget_.workers();
  for (size_t i = 0; i < workers.size(); ++i)
    if (Refuses(sequence, static_cast<int>(i))) workers[i].draining = true;
  return workers;
}

// A worker that had no room and may have some when others give theirs back.
std::optional<int> SchedulerCore::Impl::LacksRoomOn(const Sequence& sequence, const proto::Placement& placement) const {
  if (sequence.refusals.empty()) return std::nullopt;
  for (const proto::Shard& shard : placement)
    if (const auto index = budget_.IndexOf(shard.worker);
        index && budget_.workers()[*index].used > 0 && HasNoRoomFor(sequence, *index))
      return index;
  return std::nullopt;
}

// Even if nothing else lay on the attention workers.
bool SchedulerCore::Impl::FitsNowhere(Position tokens) const {
  std::vector<KvBudget::Worker> empty = budget_.workers();
  for (KvBudget::Worker& worker : empty) worker.used = 0;
  for (uint64_t turn = 0; turn < 3; ++turn)
    for (const proto::Placement& placement : PlacementsOf(PolicyOfTurn(options_.placement, turn), tokens, {}, empty))
      if (budget_.FitsEmpty(budget_.CostOf(placement, {.end = tokens}))) return false;
  return true;
}

Position SchedulerCore::Impl::LongestSequence() const {
  if (!FitsNowhere(options_.max_model_len)) return options_.max_model_len;
  int64_t fits = 0, too_long = BlocksOf(options_.max_model_len);
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (FitsNowhere(middle * kSegmentTokens) ? too_long : fits) = middle;
  }
  return fits * kSegmentTokens;
}

std::optional<proto::Placement> SchedulerCore::Impl::Place(const Sequence& sequence, PlacementPolicy policy) const {
  for (proto::Placement& placement : Possible(sequence, policy)) {
    if (LacksRoomOn(sequence, placement)) continue;
    // Room to grow by a block, unless nobody else is there.
    const Charges roomy = budget_.CostOf(placement, {.end = sequence.size() + kSegmentTokens});
    if (!budget_.Lacking(roomy, {}, kAdmissionSpare)) return placement;
    const Charges exact = budget_.CostOf(placement, {.end = sequence.size()});
    const bool alone = std::all_of(exact.begin(), exact.end(),
                                   [&](const struct Charge& c) { return budget_.workers()[c.worker].used == 0; });
    if (alone && budget_.FitsEmpty(exact)) return placement;
  }
  return std::nullopt;
}

bool SchedulerCore::Impl::AdmitOne(Sequence& sequence) {
  const Tenant& tenant = *sequence.request->tenant;
  const std::optional<PlacementPolicy> policy = NextPolicy(sequence);
  if (!policy.has_value()) {
    if (sequence.restarted || MayFitAgain(sequence.size())) {
      Strand(sequence);
    } else {
      EndChoice(sequence, FinishReason::kError, TooLarge(sequence));
    }
    return true;
  }
  const int promised = sequence.leads() ? std::min(sequence.request->unforked, options_.max_num_seqs - 1) : 0;
  if (!FreeSlots(tenant, 1 + promised)) return false;
  std::optional<proto::Placement> placement = Place(sequence, *policy);
  while (!placement.has_value()) {
    if (!FreeBlocksFor(sequence, *policy)) return false;
    placement = Place(sequence, *policy);
  }
  queues_.Remove(sequence);
  --waiting_;
  sequence.stranded_until = absl::InfiniteFuture();
  if (sequence.request->call != nullptr) sequence.request->call->begun = true;
  TakeSlot(sequence);
  ++placement_turn_;
  if (WantsProbe(sequence, *policy)) {
    Probe(sequence);
  } else {
    Open(sequence, *std::move(placement));
  }
  return true;
}

absl::Status SchedulerCore::Impl::TooLarge(const Sequence& sequence) const {
  return absl::OutOfRangeError(absl::StrCat("kv cache: the attention workers hold ", LongestSequence(),
                                            " tokens of one sequence, and this one has ", sequence.size(),
                                            "; shorten the prompt or give them more memory"));
}

// Makes room for `needed` sequences of `tenant`: at the cost of those whose reader is slow, then of a tenant that has
// more than its part of the slots while this one has less.
bool SchedulerCore::Impl::FreeSlots(const Tenant& tenant, int needed) {
  while (slots_used() + needed > options_.max_num_seqs) {
    if (PreemptPaused(std::nullopt)) continue;
    const int fair = std::max(1, options_.max_num_seqs / queues_.tenant_count());
    if (tenant.slots + needed > fair) return false;
    Sequence* victim = PickVictim(std::nullopt, [&](const Tenant& other) {
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
  const std::vector<proto::Placement> candidates = Possible(sequence, policy);
  const Charges cost = budget_.CostOf(candidates.front(), {.end = sequence.size() + kSegmentTokens});
  std::optional<int> lacking = LacksRoomOn(sequence, candidates.front());
  if (!lacking.has_value()) lacking = budget_.Lacking(cost, {}, kAdmissionSpare);
  if (!lacking.has_value()) return false;
  if (PreemptPaused(lacking)) return true;
  const uint64_t fair = budget_.capacity() / static_cast<uint64_t>(queues_.tenant_count());
  if (tenant.kv_blocks + TotalBlocks(cost) > fair) return false;
  Sequence* victim = PickVictim(lacking, [&](const Tenant& other) {
    return &other != &tenant && other.kv_blocks > fair && other.served > tenant.served;
  });
  if (victim == nullptr) return false;
  Preempt(*victim);
  return true;
}

bool SchedulerCore::Impl::PreemptPaused(std::optional<int> worker) {
  if (paused_ == 0) return false;
  Sequence* newest = nullptr;
  for (Sequence* sequence : active_) {
    if (!sequence->request->paused || !IsEvictable(*sequence)) continue;
    if (worker.has_value() && !KvAccounts::HoldsOn(*sequence, *worker)) continue;
    if (newest == nullptr || newest->age() < sequence->age()) newest = sequence;
  }
  if (newest == nullptr) return false;
  Preempt(*newest);
  return true;
}

bool SchedulerCore::Impl::WantsProbe(const Sequence& sequence, PlacementPolicy policy) const {
  return policy == PlacementPolicy::kRequest && budget_.workers().size() > 1 && !sequence.probed &&
         names_.Usable(sequence) > 0;
}

void SchedulerCore::Impl::Probe(Sequence& sequence) {
  sequence.phase = Phase::kProbing;
  sequence.pin_id = next_pin_++;
  sequence.probe_deadline = turn_.now() + kProbeTimeout;
  sequence.probes_awaited.clear();
  sequence.pinned_on.clear();
  sequence.hits.assign(budget_.workers().size(), 0);
  probes_[sequence.pin_id] = &sequence;
  probing_.push_back(&sequence);
  std::vector<proto::BlockHash> hashes;
  names_.Append(sequence, 0, names_.Usable(sequence), hashes);
  for (size_t i = 0; i < budget_.workers().size(); ++i) {
    const KvBudget::Worker& worker = budget_.workers()[i];
    if (!worker.usable()) continue;
    sequence.probes_awaited.push_back(static_cast<int>(i));
    sequence.pinned_on.emplace_back(worker.id, worker.epoch);
    const proto::Placement whole = proto::WholePlacement(options_.attention, worker.id, worker.epoch);
    turn_.Act(
        ProbePrefix{.worker = worker.id,
                    .epoch = worker.epoch,
                    .message = {.pin_id = sequence.pin_id, .shards = {whole.begin(), whole.end()}, .hashes = hashes}});
  }
}

void SchedulerCore::Impl::On(const PrefixProbed& event) {
  const auto at = probes_.find(event.probed.pin_id);
  const std::optional<int> worker = budget_.IndexOf(event.worker);
  auto* awaited = at == probes_.end() || !worker.has_value() || !budget_.IsCurrent(event.worker, event.epoch)
                      ? nullptr
                      : &at->second->probes_awaited;
  if (awaited == nullptr || std::find(awaited->begin(), awaited->end(), *worker) == awaited->end()) {
    ++stats_.late_events;
    return;
  }
  Sequence& sequence = *at->second;
  awaited->erase(std::find(awaited->begin(), awaited->end(), *worker));
  for (uint32_t blocks : event.probed.resumable) {
    if (blocks <= names_.Usable(sequence)) sequence.hits[*worker] = std::max(sequence.hits[*worker], blocks);
  }
  if (awaited->empty()) PlaceProbed(sequence);
}

void SchedulerCore::Impl::PlaceProbed(Sequence& sequence) {
  sequence.probed = true;
  if (std::optional<proto::Placement> placement = Place(sequence, PlacementPolicy::kRequest)) {
    Open(sequence, *std::move(placement));
    EndProbe(sequence);  // after Open: what was opened is kept by the sequence, not by the pin
    sequence.probed = false;
    sequence.hits.clear();
  } else {
    EndProbe(sequence);
    GiveBackSlot(sequence);
    Wait(sequence);
  }
}

void SchedulerCore::Impl::EndProbe(Sequence& sequence) {
  probes_.erase(sequence.pin_id);
  probing_.erase(std::find(probing_.begin(), probing_.end(), &sequence));
  for (const auto& [worker, epoch] : sequence.pinned_on) {
    if (!budget_.IsCurrent(worker, epoch)) continue;
    turn_.Act(Unpin{.worker = worker, .epoch = epoch, .message = {.pin_id = sequence.pin_id}});
  }
  sequence.pinned_on.clear();
}

void SchedulerCore::Impl::ExpireProbes() {
  while (!probing_.empty() && probing_.front()->probe_deadline <= turn_.now()) PlaceProbed(*probing_.front());
}

}  // namespace dovetail::scheduler
