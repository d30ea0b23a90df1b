#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/ids.h"
#include "transport/ucx/process.h"
#include "transport/ucx/region.h"

namespace dovetail::transport::ucx {

// Regions of peers that were removed. Such a peer may have been stopped in the middle of a PUT and may continue at any
// time. So its region stays mapped and is not used for another peer. It is freed when its writer says that it cannot
// write any more (as a port does that ends) or when the writer's process has ended.
// Threads: reactor-owned.
class RetiredRegions {
 public:
  explicit RetiredRegions(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Never refuses: while it holds `max_bytes` no new regions must be made (HasRoom), which is what bounds it.
  void Add(NodeId writer, Epoch epoch, std::unique_ptr<ReceiveRegion> region, ProcessWatch process);
  bool HasRoom() const { return bytes_ < max_bytes_; }

  void Released(NodeId writer, Epoch epoch);
  void Reap();   // of processes that have ended
  void Clear();  // at the end of the port: a key that is opened from now on opens nothing, or shows another token

  bool empty() const { return regions_.empty(); }
  uint64_t bytes() const { return bytes_; }  // of addresses; pages are there only for what is written

 private:
  struct Retired {
    NodeId writer;
    Epoch epoch;
    std::unique_ptr<ReceiveRegion> region;
    ProcessWatch process;
  };
  template <typename F>
  void Drop(F&& which);

  const uint64_t max_bytes_;
  std::vector<Retired> regions_;
  uint64_t bytes_ = 0;
};

}  // namespace dovetail::transport::ucx
