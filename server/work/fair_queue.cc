#include "server/work/fair_queue.h"

#include <algorithm>
#include <utility>

namespace dovetail::server {

absl::Status FairQueue::Push(WorkTask&& task) {
  if (size_ > 0 && (size_ >= limits_.tasks || task.bytes > limits_.bytes - std::min(bytes_, limits_.bytes)))
    return ResourceExhausted("too many requests wait to be read");
  Tenant& tenant = tenants_[task.tenant];
  if (tenant.tasks > 0 && (tenant.tasks >= limits_.tenant_tasks ||
                           task.bytes > limits_.tenant_bytes - std::min(tenant.bytes, limits_.tenant_bytes)))
    return absl::AbortedError("too many requests of this tenant wait to be read");
  Lane& lane = tenant.lanes[task.bytes > kShortBytes];
  if (tenant.tasks == 0) tenant.served = std::max(tenant.served, clock_);
  if (lane.entries.empty()) lane.served = std::max(lane.served, tenant.clock);
  ++size_;
  ++tenant.tasks;
  bytes_ += task.bytes;
  tenant.bytes += task.bytes;
  lane.entries.push_back({arrivals_++, std::move(task)});
  return absl::OkStatus();
}

FairQueue::Lane& FairQueue::Tenant::Next() {
  Lane& brief = lanes[0];
  Lane& lengthy = lanes[1];
  if (brief.entries.empty() || lengthy.entries.empty()) return brief.entries.empty() ? lengthy : brief;
  if (brief.served != lengthy.served) return brief.served < lengthy.served ? brief : lengthy;
  return brief.entries.front().arrival < lengthy.entries.front().arrival ? brief : lengthy;
}

FairQueue::Tenants::iterator FairQueue::NextTenant() {
  auto best = tenants_.end();
  std::pair<uint64_t, uint64_t> least;
  for (auto tenant = tenants_.begin(); tenant != tenants_.end(); ++tenant) {
    if (tenant->second.tasks == 0) continue;
    const std::pair key(tenant->second.served, tenant->second.Next().entries.front().arrival);
    if (best != tenants_.end() && key >= least) continue;
    best = tenant;
    least = key;
  }
  return best;
}

std::optional<WorkTask> FairQueue::Pop() {
  const auto next = NextTenant();
  if (next == tenants_.end()) return std::nullopt;
  Tenant& tenant = next->second;
  Lane& lane = tenant.Next();
  clock_ = tenant.served;
  tenant.clock = lane.served;
  const uint64_t cost = lane.entries.front().task.bytes + kTaskCost;
  tenant.served += cost;
  lane.served += cost;
  return Take(tenant, lane, lane.entries.begin());
}

std::optional<WorkTask> FairQueue::Remove(const CancelToken& token) {
  for (auto& [name, tenant] : tenants_) {
    for (Lane& lane : tenant.lanes) {
      const auto found = std::find_if(lane.entries.begin(), lane.entries.end(),
                                      [&](const Lane::Entry& entry) { return entry.task.cancel.get() == &token; });
      if (found != lane.entries.end()) return Take(tenant, lane, found);
    }
  }
  return std::nullopt;
}

WorkTask FairQueue::Take(Tenant& tenant, Lane& lane, const std::deque<Lane::Entry>::iterator& entry) {
  WorkTask task = std::move(entry->task);
  lane.entries.erase(entry);
  --size_;
  --tenant.tasks;
  bytes_ -= task.bytes;
  tenant.bytes -= task.bytes;
  if (size_ == 0) {
    tenants_.clear();
    clock_ = 0;
  }
  return task;
}

}  // namespace dovetail::server
