#include "scheduler/core/probes.h"

#include <algorithm>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

bool Probes::IsWorthwhile(const Sequence& sequence, PlacementPolicy policy) const {
  const bool whole = policy == PlacementPolicy::kRequest || policy == PlacementPolicy::kTiers;
  return whole && budget_.workers().size() > 1 && !sequence.probed && names_.Usable(sequence) > 0;
}

void Probes::Begin(Sequence& sequence) {
  sequence.phase = Phase::kProbing;
  sequence.pin_id = next_pin_++;
  sequence.probe_deadline = turn_.now() + kProbeTimeout;
  sequence.probes_awaited.clear();
  sequence.pinned_on.clear();
  sequence.hits.assign(budget_.workers().size(), 0);
  by_pin_[sequence.pin_id] = &sequence;
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

Sequence* Probes::Take(const PrefixProbed& event) {
  const auto at = by_pin_.find(event.probed.pin_id);
  const std::optional<int> worker = budget_.IndexOf(event.worker);
  const bool current = at != by_pin_.end() && worker.has_value() && budget_.IsCurrent(event.worker, event.epoch);
  auto* const awaited = current ? &at->second->probes_awaited : nullptr;
  if (awaited == nullptr || std::find(awaited->begin(), awaited->end(), *worker) == awaited->end()) {
    turn_.CountLate();
    return nullptr;
  }
  Sequence& sequence = *at->second;
  awaited->erase(std::find(awaited->begin(), awaited->end(), *worker));
  for (const uint32_t blocks : event.probed.resumable) {
    if (blocks <= names_.Usable(sequence)) sequence.hits[*worker] = std::max(sequence.hits[*worker], blocks);
  }
  return awaited->empty() ? &sequence : nullptr;
}

std::vector<Sequence*> Probes::Lose(int worker) {
  std::vector<Sequence*> complete;
  for (Sequence* sequence : probing_) {
    auto& awaited = sequence->probes_awaited;
    const auto at = std::find(awaited.begin(), awaited.end(), worker);
    if (at == awaited.end()) continue;
    awaited.erase(at);
    if (awaited.empty()) complete.push_back(sequence);
  }
  return complete;
}

Sequence* Probes::Expired() const {
  return !probing_.empty() && probing_.front()->probe_deadline <= turn_.now() ? probing_.front() : nullptr;
}

void Probes::End(Sequence& sequence) {
  by_pin_.erase(sequence.pin_id);
  probing_.erase(std::find(probing_.begin(), probing_.end(), &sequence));
  for (const auto& [worker, epoch] : sequence.pinned_on) {
    if (!budget_.IsCurrent(worker, epoch)) continue;
    turn_.Act(Unpin{.worker = worker, .epoch = epoch, .message = {.pin_id = sequence.pin_id}});
  }
  sequence.pinned_on.clear();
}

absl::Time Probes::NextDeadline() const {
  return probing_.empty() ? absl::InfiniteFuture() : probing_.front()->probe_deadline;
}

}  // namespace dovetail::scheduler
