#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/tenant_queues.h"

namespace dovetail::scheduler {

// The records of requests and of their choices, from arrival until the last step that contains one has returned.
// Ownership: pointers to records are valid until ForgetFinished.
// Threads: thread-compatible.
class RequestTable {
 public:
  // Both outlive the table.
  RequestTable(const SchedulerOptions& options, TenantQueues& queues) : options_(options), queues_(queues) {}

  // Makes the records. No choice waits or holds anything yet; those to be forked from the first one are counted.
  // Requires: the id is not here.
  RequestState& Add(const std::shared_ptr<const GenerationRequest>& request, absl::Time now);
  RequestState* Find(RequestId id);    // null: it is not here
  bool HasBegun(uint64_t call) const;  // GenerationRequest::call: a request of it has run
  // All choices are over: the records go with the next ForgetFinished() after the last step that contains one.
  void Finish(const RequestState& request) { finished_.push_back(request.request->id); }
  void ForgetFinished();

  size_t size() const { return requests_.size(); }
  template <typename Visit>
  void ForEach(Visit&& visit) const {  // in no order: for what must be true of each
    for (const auto& [id, request] : requests_) visit(*request);
  }

 private:
  const SchedulerOptions& options_;
  TenantQueues& queues_;
  absl::flat_hash_map<RequestId, std::unique_ptr<RequestState>> requests_;  // no decision iterates it
  std::map<uint64_t, Call> calls_;
  std::vector<RequestId> finished_;
  uint64_t next_ordinal_ = 0;
};

}  // namespace dovetail::scheduler
