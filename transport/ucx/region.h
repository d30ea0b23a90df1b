#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {

// Shared memory that one incarnation of one peer may PUT into. It is an object of its own, which lives until nobody maps it: a peer that was
// stopped and goes on after its region is gone here writes into pages that nothing else will ever use.
class ReceiveRegion {
 public:
  // kResourceExhausted: no memory, or less than sixteen times as much shared memory (a container's /dev/shm may be small).
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
