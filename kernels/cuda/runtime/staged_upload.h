#pragma once
#include <array>
#include <memory>

#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Small host data on its way to the device, once a step: assembled in pinned memory, one copy, no waiting. What was
// sent lies at device() until the next Send, for work that the stream was given before it.
// Ownership: must not outlive its device.
// Threads: thread-compatible.
class StagedUpload {
 public:
  explicit StagedUpload(CudaDevice& device) : device_(device) {}

  // So that no Begin within these bytes allocates. kResourceExhausted.
  absl::Status Reserve(size_t bytes);
  // Pinned memory of `bytes` to fill before Send. Waits, on the host, only for the upload of four sends ago; grows if
  // it must. kResourceExhausted.
  absl::StatusOr<std::byte*> Begin(CudaStream& stream, size_t bytes);
  absl::Status Send(CudaStream& stream);  // the bytes of the last Begin

  std::byte* device() const { return memory_->data(); }

 private:
  struct Staging {
    std::unique_ptr<Buffer> host;
    CudaEvent copied;
  };
  absl::Status Grow(Staging& staging, size_t bytes);

  CudaDevice& device_;
  std::array<Staging, 4> staging_;
  int at_ = 0;
  size_t bytes_ = 0;
  std::unique_ptr<Buffer> memory_;
};

// Where the parts of an upload lie: each on a boundary of 256 bytes.
// Threads: thread-compatible; a value.
class UploadLayout {
 public:
  template <typename T>
  size_t Add(size_t count) {
    const size_t at = bytes_;
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace dovetail::kernels::cuda
