#include "scheduler/core/refusals.h"

#include <algorithm>

namespace dovetail::scheduler {

Refusal* Refusals::By(WorkerId worker, const KvBudget& budget) {
  const std::optional<int> index = budget.IndexOf(worker);
  if (!index) return nullptr;
  const Epoch epoch = budget.workers()[*index].epoch;
  auto* at = std::find_if(refusals_.begin(), refusals_.end(), [&](const Refusal& r) { return r.worker == worker; });
  if (at == refusals_.end()) at = &refusals_.emplace_back();
  if (at->worker != worker || at->epoch != epoch) *at = {.worker = worker, .epoch = epoch};
  return at;
}

void Refusals::WasOpened() {
  for (Refusal& refusal : refusals_) refusal.opens = 0;
}

const Refusal* Refusals::Find(int worker, const KvBudget& budget) const {
  const KvBudget::Worker& now = budget.workers()[worker];
  const auto* at = std::find_if(refusals_.begin(), refusals_.end(), [&](const Refusal& refusal) {
    return refusal.worker == now.id && refusal.epoch == now.epoch;
  });
  return at == refusals_.end() ? nullptr : at;
}

bool Refusals::HadNoRoomOn(int worker, const KvBudget& budget) const {
  const Refusal* const refusal = Find(worker, budget);
  return refusal != nullptr && (refusal->alone || refusal->freed == budget.workers()[worker].freed);
}

bool Refusals::Include(int worker, const KvBudget& budget) const {
  const Refusal* const refusal = Find(worker, budget);
  return refusal != nullptr && (refusal->damaged || HadNoRoomOn(worker, budget));
}

std::vector<KvBudget::Worker> Refusals::Others(const KvBudget& budget) const {
  std::vector<KvBudget::Worker> workers = budget.workers();
  for (size_t i = 0; i < workers.size(); ++i)
    if (Include(static_cast<int>(i), budget)) workers[i].draining = true;
  return workers;
}

}  // namespace dovetail::scheduler
