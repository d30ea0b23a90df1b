#include "scheduler/core/tenant_queues.h"

#include <algorithm>

#include "base/check.h"

namespace dovetail::scheduler {
namespace {

QueueKey KeyOf(const Sequence& sequence) {
  return {!sequence.restarted, sequence.restarted ? 0 : sequence.params().priority, sequence.request->ordinal,
          sequence.choice};
}

// Of several choices, and of several requests of a call, one may run while another waits.
bool NeverRan(const RequestState& request) {
  if (request.call != nullptr && request.call->begun) return false;
  return std::all_of(request.choices.begin(), request.choices.end(), [](const auto& sequence) {
    return !sequence->restarted && (sequence->phase == Phase::kWaiting || sequence->phase == Phase::kUnforked);
  });
}

}  // namespace

Tenant& TenantQueues::Enter(const std::string& name) {
  const auto [at, is_new] = tenants_.try_emplace(name);
  Tenant& tenant = at->second;
  if (is_new) {
    tenant.name = name;
    uint64_t least = UINT64_MAX;
    for (const auto& [other_name, other] : tenants_) {
      if (&other != &tenant) least = std::min(least, other.served);
    }
    tenant.served = least == UINT64_MAX ? 0 : least;
  }
  ++tenant.requests;
  return tenant;
}

void TenantQueues::Leave(Tenant& tenant) {
  if (--tenant.requests > 0) return;
  DT_CHECK(tenant.waiting.empty() && tenant.slots == 0 && tenant.kv_blocks == 0,
           "a tenant left something behind: ", tenant.waiting.size(), " waiting, ", tenant.slots, " slots, ",
           tenant.kv_blocks, " KV blocks");
  tenants_.erase(std::string(tenant.name));
}

void TenantQueues::Push(Sequence& sequence) {
  const bool is_new = sequence.request->tenant->waiting.emplace(KeyOf(sequence), &sequence).second;
  DT_CHECK(is_new, "a sequence was queued twice");
  ++waiting_;
}

void TenantQueues::Remove(Sequence& sequence) {
  waiting_ -= static_cast<int>(sequence.request->tenant->waiting.erase(KeyOf(sequence)));
}

Tenant* TenantQueues::LeastServed() {
  if (waiting_ == 0) return nullptr;
  Tenant* least = nullptr;
  for (auto& [name, tenant] : tenants_) {
    if (tenant.waiting.empty()) continue;
    if (least == nullptr || tenant.served < least->served) least = &tenant;
  }
  return least;
}

Sequence* TenantQueues::LastOfLongest(const std::string& than) {
  const auto own = tenants_.find(than);
  const size_t fewer = (own == tenants_.end() ? 0 : own->second.waiting.size()) + 1;
  Tenant* longest = nullptr;
  for (auto& [name, tenant] : tenants_) {
    if (longest == nullptr || tenant.waiting.size() > longest->waiting.size()) longest = &tenant;
  }
  if (longest == nullptr || longest->waiting.size() <= fewer) return nullptr;
  for (auto at = longest->waiting.rbegin(); at != longest->waiting.rend(); ++at) {
    if (NeverRan(*at->second->request)) return at->second;
  }
  return nullptr;
}

bool TenantQueues::HasItsPart(const std::string& name) const {
  const auto own = tenants_.find(name);
  if (own == tenants_.end()) return false;
  size_t all = 0, tenants = 0;
  for (const auto& [other, tenant] : tenants_) {
    all += tenant.waiting.size();
    tenants += !tenant.waiting.empty();
  }
  const size_t mine = own->second.waiting.size();
  return mine > 0 && mine < all && mine * tenants >= all;
}

}  // namespace dovetail::scheduler
