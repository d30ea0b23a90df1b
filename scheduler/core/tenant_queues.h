#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// Restarted sequences come first, then by priority, then first come first served.
using QueueKey = std::tuple<bool, int, uint64_t, int>;

// A tenant that has requests here. Tenants without requests are forgotten.
struct Tenant {
  std::string name;
  uint64_t served = 0;  // the virtual counter: tokens computed for it, lifted when it comes back
  int requests = 0;
  int slots = 0;  // running sequences, and those promised to choices that are still to be forked
  uint64_t kv_blocks = 0;
  std::map<QueueKey, Sequence*> waiting;
};

// Which tenants wait for what, and which is next: always the one that was served least, so that each gets an equal part
// of the tokens whatever it asks for. A tenant that comes back is lifted to the least counter of those present: being
// away earns nothing.
// Source: virtual token counter, Sheng et al. 2024.
// Ownership: references to a Tenant are valid until it leaves.
// Threads: thread-compatible.
class TenantQueues {
 public:
  Tenant& Enter(const std::string& name);  // one more request of it
  void Leave(Tenant& tenant);              // one less; the last one forgets the tenant

  void Push(Sequence& sequence);
  void Remove(Sequence& sequence);  // nothing happens if it is not there
  Tenant* LeastServed();            // of those with a sequence in the queue; null: none waits

  // The last in line, of a request that never ran, nor any other of its call, of the tenant with the longest queue, if
  // `than` would still have fewer with one more; else null.
  Sequence* LastOfLongest(const std::string& than);
  // Others wait, too, and this one has at least as much of the queue as each would have of equal parts.
  bool HasItsPart(const std::string& name) const;

  int tenant_count() const { return static_cast<int>(tenants_.size()); }
  int waiting() const { return waiting_; }

 private:
  std::map<std::string, Tenant> tenants_;
  int waiting_ = 0;
};

}  // namespace dovetail::scheduler
