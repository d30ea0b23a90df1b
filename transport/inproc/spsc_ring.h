#pragma once
#include <atomic>
#include <bit>
#include <cstddef>
#include <utility>
#include <vector>

namespace dovetail::transport {

// A bounded queue between one writing and one reading thread. Wait-free; allocates only in the constructor. Elements
// must be movable.
// Threads: one thread pushes, and one other thread reads and pops.
template <typename T>
class SpscRing {
 public:
  explicit SpscRing(size_t capacity) : slots_(std::bit_ceil(capacity)), mask_(slots_.size() - 1) {}

  bool TryPush(T&& value) {  // false: full, value untouched
    const size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) > mask_) return false;
    slots_[tail & mask_] = std::move(value);
    tail_.store(tail + 1, std::memory_order_release);
    return true;
  }

  // The oldest element, or null. Stays valid until Pop().
  T* Front() {
    const size_t head = head_.load(std::memory_order_relaxed);
    return head == tail_.load(std::memory_order_acquire) ? nullptr : &slots_[head & mask_];
  }
  void Pop() { head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  std::vector<T> slots_;
  const size_t mask_;
  alignas(64) std::atomic<size_t> head_{0};
  alignas(64) std::atomic<size_t> tail_{0};
};

}  // namespace dovetail::transport
