#include "server/work/admission.h"

#include <algorithm>

namespace dovetail::server {

// Of a tenant's requests here at most `running` run and `paused` are set aside, and the others wait. If these are more
// than half of all waiting requests, no tenant has more, and the scheduler would refuse one of this tenant's.
absl::Status Admission::Check(const std::string& tenant, const engine::EngineStats& engine) const {
  const scheduler::SchedulerStats& stats = engine.scheduler;
  if (engine.max_queued_requests == 0 || stats.waiting_requests < engine.max_queued_requests) return absl::OkStatus();
  MutexLock lock(mutex_);
  const auto own = active_.find(tenant);
  if (own == active_.end()) return absl::OkStatus();
  const int waiting = own->second - stats.running_sequences - stats.paused_requests;
  if (2 * waiting <= stats.waiting_requests) return absl::OkStatus();
  if (active_.size() > 1) return absl::AbortedError("this tenant fills the queue");
  return ResourceExhausted("the queue is full");
}

void Admission::Began(const std::string& tenant, int requests) {
  MutexLock lock(mutex_);
  active_[tenant] += requests;
}

void Admission::Ended(const std::string& tenant, int requests, absl::Time now) {
  MutexLock lock(mutex_);
  if (const auto own = active_.find(tenant); own != active_.end() && (own->second -= requests) <= 0) active_.erase(own);
  const int64_t second = absl::ToUnixSeconds(now);
  const size_t slot = static_cast<size_t>(second % kSeconds);
  if (seconds_[slot] != second) ended_[slot] = 0;
  seconds_[slot] = second;
  ended_[slot] += requests;
  any_ended_ = true;
}

int Admission::RetryAfterSeconds(int waiting_requests, absl::Time now) const {
  MutexLock lock(mutex_);
  if (!any_ended_) return 1;  // nothing is known yet
  const int64_t second = absl::ToUnixSeconds(now);
  int ended = 0;
  for (int i = 0; i < kSeconds; ++i)
    if (seconds_[i] > second - kSeconds && seconds_[i] <= second) ended += ended_[i];
  if (ended == 0) return kSeconds;
  return static_cast<int>(std::clamp<int64_t>((int64_t{waiting_requests} * kSeconds + ended - 1) / ended, 1, 60));
}

}  // namespace dovetail::server
