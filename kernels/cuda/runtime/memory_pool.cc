#include "kernels/cuda/runtime/memory_pool.h"

#include <utility>

namespace dovetail::kernels::cuda {

size_t MemoryPool::RoundUp(size_t bytes) {
  const size_t step = bytes < (size_t{1} << 20) ? 512 : size_t{2} << 20;
  return (bytes + step - 1) / step * step;
}

absl::StatusOr<void*> MemoryPool::Take(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t size = RoundUp(bytes);
  {
    MutexLock lock(mutex_);
    const auto found = kept_.find(size);
    if (found != kept_.end() && !found->second.empty()) {
      void* memory = found->second.back();
      found->second.pop_back();
      kept_bytes_ -= size;
      taken_bytes_ += size;
      return memory;
    }
  }
  absl::StatusOr<void*> memory = allocate_(size);
  if (!memory.ok() && free_ != nullptr && kept_bytes() > 0) {
    Trim();
    memory = allocate_(size);
  }
  if (!memory.ok()) return memory;
  MutexLock lock(mutex_);
  taken_bytes_ += size;
  return memory;
}

void MemoryPool::Return(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  const size_t size = RoundUp(bytes);
  MutexLock lock(mutex_);
  kept_[size].push_back(memory);
  kept_bytes_ += size;
  taken_bytes_ -= size;
}

void MemoryPool::Trim() {
  if (free_ == nullptr) return;
  std::map<size_t, std::vector<void*>> kept;
  {
    MutexLock lock(mutex_);
    kept = std::exchange(kept_, {});
    kept_bytes_ = 0;
  }
  for (const auto& [size, pieces] : kept) {
    for (void* memory : pieces) free_(memory);
  }
}

size_t MemoryPool::taken_bytes() const {
  MutexLock lock(mutex_);
  return taken_bytes_;
}

size_t MemoryPool::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace dovetail::kernels::cuda
