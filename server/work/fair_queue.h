#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/cancel_token.h"
#include "base/status.h"

namespace dovetail::server {

// What is to be done for one request off the I/O threads: parsing, rendering, tokenising.
struct WorkTask {
  std::string tenant;
  size_t bytes = 0;  // of what is to be read: what it costs
  std::shared_ptr<const CancelToken> cancel;
  std::function<void()> run;
};

// Of tasks that wait, in all and of one tenant. One that runs has left the queue.
struct WorkLimits {
  int tasks = 256;
  int tenant_tasks = 128;
  size_t bytes = size_t{256} << 20;
  size_t tenant_bytes = size_t{128} << 20;
};

// Tasks that wait for a worker, and which one is next.
//
// Tenants share the workers by bytes: next is the tenant that was served the fewest while it had something to do. A
// task costs its bytes and kTaskCost. One that comes is level with the others, whatever it did before: it waits for the
// task that runs and for at most one of each other tenant, and saves up nothing.
// The tasks of a tenant are short ones (up to kShortBytes) and long ones, each in order of arrival, and these two share
// by the same rule: neither starves the other.
//
// Threads: thread-compatible; a value.
class FairQueue {
 public:
  static constexpr size_t kTaskCost = 4 << 10;
  static constexpr size_t kShortBytes = 64 << 10;

  explicit FairQueue(const WorkLimits& limits) : limits_(limits) {}

  // kResourceExhausted: the queue is full; kAborted: this tenant's part of it is. Then `task` is as it was. A task
  // alone is never too large.
  absl::Status Push(WorkTask&& task);

  std::optional<WorkTask> Pop();

  // Takes out the task with this token, if it still waits.
  std::optional<WorkTask> Remove(const CancelToken& token);

  int size() const { return size_; }
  size_t bytes() const { return bytes_; }

 private:
  // Start-time fair queueing: `served` is in bytes, and no less than the clock when something comes after a pause.
  struct Share {
    uint64_t served = 0;
  };
  struct Lane : Share {
    struct Entry {
      uint64_t arrival;
      WorkTask task;
    };
    std::deque<Entry> entries;
  };
  struct Tenant : Share {
    uint64_t clock = 0;
    std::array<Lane, 2> lanes;  // short, long
    int tasks = 0;
    size_t bytes = 0;
    Lane& Next();
  };
  using Tenants = std::map<std::string, Tenant>;

  Tenants::iterator NextTenant();
  WorkTask Take(Tenant& tenant, Lane& lane, const std::deque<Lane::Entry>::iterator& entry);

  const WorkLimits limits_;
  Tenants tenants_;  // as many as keys name; forgotten when nothing waits
  uint64_t clock_ = 0, arrivals_ = 0;
  int size_ = 0;
  size_t bytes_ = 0;
};

}  // namespace dovetail::server
