#include "kernels/aligned_buffer.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace dovetail::kernels {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t RoundUp(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

size_t MachineBytes() {
  struct sysinfo info;
  return sysinfo(&info) == 0 ? static_cast<size_t>(info.totalram) * info.mem_unit : SIZE_MAX / 2;
}

// aligned_alloc gives fresh zero pages for such sizes in practice, but does not promise it: mmap
// does. Over-mapped, then cut to alignment.
std::byte* MapHuge(size_t size_bytes) {
  const size_t length = RoundUp(size_bytes, kHugePage);
  void* raw =
      mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* base = static_cast<std::byte*>(raw);
  auto* aligned = reinterpret_cast<std::byte*>(RoundUp(reinterpret_cast<size_t>(base), kHugePage));
  if (aligned != base) munmap(base, aligned - base);
  if (base + kHugePage != aligned) munmap(aligned + length, base + kHugePage - aligned);
  madvise(aligned, length,
          MADV_HUGEPAGE);  // a hint: without it everything works, with more TLB misses
  return aligned;
}

}  // namespace

absl::StatusOr<AlignedBuffer> AlignedBuffer::Create(size_t size_bytes) {
  if (size_bytes == 0) return AlignedBuffer();
  const size_t machine = MachineBytes();
  if (size_bytes > machine) {
    return ResourceExhausted("a buffer of ", size_bytes, " bytes does not fit into this machine's ", machine,
                             " bytes of memory");
  }
  std::byte* data = nullptr;
  if (size_bytes >= kHugeBytes) {
    data = MapHuge(size_bytes);
  } else {
    const size_t length = RoundUp(size_bytes, kAlignment);
    data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, length));
    if (data != nullptr) std::memset(data, 0, length);
  }
  if (data == nullptr) return ResourceExhausted("the system refused a buffer of ", size_bytes, " bytes");
  return AlignedBuffer(data, size_bytes);
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ == nullptr) return;
  if (size_bytes_ >= kHugeBytes) {
    munmap(data_, RoundUp(size_bytes_, kHugePage));
  } else {
    std::free(data_);
  }
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

}  // namespace dovetail::kernels
