#pragma once
#include <cstddef>
#include <span>

#include "base/status.h"

namespace dovetail::kernels {

// Zeroed host memory, aligned to 64 bytes, freed on destruction. Large buffers (kHugeBytes and more) are aligned to 2
// MiB, ask the system for huge pages and take physical memory only when touched. Movable.
// Threads: thread-compatible.
class AlignedBuffer {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kHugeBytes = size_t{4} << 20;

  // kResourceExhausted, with both sizes, when the machine has less memory than that or the system
  // refuses.
  static absl::StatusOr<AlignedBuffer> Create(size_t size_bytes);

  AlignedBuffer() = default;
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> bytes() { return {data_, size_bytes_}; }

 private:
  AlignedBuffer(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace dovetail::kernels
