#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {

// Memory that one incarnation of one peer may PUT into. Memory that a peer can still reach is not used for anything else: a region whose
// peer was removed is kept, unused, until that process is known to be dead.
class ReceiveRegion {
 public:
  // kResourceExhausted: no memory, or no shared memory (a container's /dev/shm may be small).
  static absl::StatusOr<std::unique_ptr<ReceiveRegion>> Create(const UcxWorker& worker, uint64_t bytes);
  ~ReceiveRegion();

  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return bytes_; }
  absl::StatusOr<std::string> RemoteKey() const;

 private:
  explicit ReceiveRegion(ucp_context_h context) : context_(context) {}

  ucp_context_h context_;
  ucp_mem_h handle_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace dovetail::transport::ucx
