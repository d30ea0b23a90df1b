#include "scheduler/core/slots.h"

#include <algorithm>
#include <tuple>

#include "scheduler/core/kv_accounts.h"

namespace dovetail::scheduler {
namespace {

bool IsEvictable(const Sequence& sequence) {
  const bool holds = sequence.phase >= Phase::kOpening && sequence.phase <= Phase::kReady;
  return holds && sequence.in_flight == 0 && sequence.planned == 0;
}

}  // namespace

int Slots::PromisedTo(const Sequence& sequence) const {
  return sequence.leads() ? std::min(sequence.request->unforked, most_ - 1) : 0;
}

void Slots::Take(Sequence& sequence, absl::Time now) {
  active_.push_back(&sequence);
  RequestState& request = *sequence.request;
  request.admitted = std::min(request.admitted, now);
  ++request.tenant->slots;
  if (!sequence.leads()) return;
  request.reserved_slots = PromisedTo(sequence);
  promised_ += request.reserved_slots;
  request.tenant->slots += request.reserved_slots;
}

void Slots::GiveBack(Sequence& sequence) {
  active_.erase(std::find(active_.begin(), active_.end(), &sequence));
  RequestState& request = *sequence.request;
  --request.tenant->slots;
  if (sequence.phase != Phase::kEnded) DropPromises(request);  // else another may lead by now
}

// Only the leader of unforked choices has any.
void Slots::DropPromises(RequestState& request) {
  promised_ -= request.reserved_slots;
  request.tenant->slots -= request.reserved_slots;
  request.reserved_slots = 0;
}

void Slots::DropPromiseOfOne(RequestState& request) {
  if (request.reserved_slots <= request.unforked) return;
  --request.reserved_slots;
  --promised_;
  --request.tenant->slots;
}

Sequence* Slots::Oldest() const {
  Sequence* oldest = nullptr;
  for (Sequence* sequence : active_) {
    if (sequence->phase < Phase::kOpening || sequence->phase > Phase::kReady || sequence->request->paused) continue;
    if (oldest == nullptr || sequence->age() < oldest->age()) oldest = sequence;
  }
  return oldest;
}

Sequence* Slots::PickVictim(std::optional<int> worker, absl::FunctionRef<bool(const Tenant&)> allowed) const {
  const Sequence* oldest = Oldest();
  Sequence* victim = nullptr;
  const auto rank = [](const Sequence& s) {
    return std::make_tuple(s.request->paused, s.request->tenant->served, s.request->tenant, s.age());
  };
  const auto comes_before = [&](const Sequence& a, const Sequence& b) {
    const auto [a_paused, a_served, a_tenant, a_age] = rank(a);
    const auto [b_paused, b_served, b_tenant, b_age] = rank(b);
    if (a_paused != b_paused) return a_paused;
    if (a_served != b_served) return a_served > b_served;
    if (a_tenant != b_tenant) return a_tenant->name < b_tenant->name;
    return a_age > b_age;
  };
  for (Sequence* sequence : active_) {
    if (sequence == oldest || !IsEvictable(*sequence) || !allowed(*sequence->request->tenant)) continue;
    if (worker.has_value() && !KvAccounts::HoldsOn(*sequence, *worker)) continue;
    if (victim == nullptr || comes_before(*sequence, *victim)) victim = sequence;
  }
  return victim;
}

Sequence* Slots::PickPaused(std::optional<int> worker) const {
  Sequence* newest = nullptr;
  for (Sequence* sequence : active_) {
    if (!sequence->request->paused || !IsEvictable(*sequence)) continue;
    if (worker.has_value() && !KvAccounts::HoldsOn(*sequence, *worker)) continue;
    if (newest == nullptr || newest->age() < sequence->age()) newest = sequence;
  }
  return newest;
}

}  // namespace dovetail::scheduler
