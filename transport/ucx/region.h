#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {

// Shared memory that one incarnation of one peer may PUT into. It is an object of its own. Its key names a descriptor
// of this process, which the system gives to something else once the region is gone: a region therefore stays until
// nobody can use its key any more (RetiredRegions), and who opens a key compares the token at its front.
class ReceiveRegion {
 public:
  // kResourceExhausted: no memory, or less than sixteen times as much shared memory (a container's /dev/shm may be
  // small).
  static absl::StatusOr<std::unique_ptr<ReceiveRegion>> Create(const UcxWorker& worker, uint64_t bytes);
  ~ReceiveRegion();

  const std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return bytes_; }
  uint64_t token() const { return token_; }  // random; also at kTokenBefore bytes before data()
  absl::StatusOr<std::string> RemoteKey() const;

  // Gives the pages back to the system, but not the addresses: what is written from now on lands in fresh pages.
  void DropPages();

  static constexpr uint64_t kTokenBefore = 4096;

 private:
  explicit ReceiveRegion(ucp_context_h context) : context_(context) {}

  ucp_context_h context_;
  ucp_mem_h handle_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t token_ = 0;
};

}  // namespace dovetail::transport::ucx
