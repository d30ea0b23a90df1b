#include "kernels/pages_ahead.h"

#include <sys/mman.h>

#include <algorithm>

namespace dovetail::kernels {
namespace {

constexpr size_t kPiece = size_t{2} << 20;  // of a huge page's size: others may fault meanwhile
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

}  // namespace

PagesAhead::PagesAhead(std::span<std::byte> memory, size_t ahead)
    : memory_(memory), ahead_(ahead), told_(std::min(ahead, memory.size())), target_(told_) {
  // With the priority of other threads: while it takes a piece it reads the address space, and those that map memory
  // would wait for it.
  thread_ = std::thread([this] { Run(); });
}

PagesAhead::~PagesAhead() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void PagesAhead::WillUse(size_t end) {
  const size_t target = std::min(memory_.size(), end + ahead_);
  if (target <= told_ || (target < told_ + ahead_ / 8 && target < memory_.size())) return;
  told_ = target;
  {
    MutexLock lock(mutex_);
    target_ = target;
  }
  wake_.notify_one();
}

void PagesAhead::Run() {
  size_t at = 0;
  MutexLock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || at < target_; });
    if (stop_) return;
    const size_t target = target_;
    lock.unlock();
    for (; at < target; at += kPiece) {
      if (stop_) return;
      const size_t bytes = std::min(memory_.size() - at, kPiece);
      if (madvise(memory_.data() + at, bytes, MADV_POPULATE_WRITE) != 0) return;
      taken_.store(at + bytes, std::memory_order_relaxed);
    }
    lock.lock();
  }
}

}  // namespace dovetail::kernels
