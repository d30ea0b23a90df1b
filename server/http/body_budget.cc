#include "server/http/body_budget.h"

#include <algorithm>
#include <utility>

namespace dovetail::server {

bool BodyBudget::HasRoom(size_t bytes) const {
  const size_t held = this->held();
  return held <= max_bytes_ && bytes <= max_bytes_ - held;
}

bool BodyBudget::Take(size_t bytes) {
  size_t held = this->held();
  do {
    if (bytes > max_bytes_ - held) return false;
  } while (!held_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  return true;
}

RequestBody::RequestBody(RequestBody&& other) noexcept
    : budget_(std::move(other.budget_)),
      bytes_(std::exchange(other.bytes_, {})),
      counted_(std::exchange(other.counted_, 0)) {}

RequestBody& RequestBody::operator=(RequestBody&& other) noexcept {
  if (this == &other) return *this;
  Free();
  budget_ = std::move(other.budget_);
  bytes_.swap(other.bytes_);
  counted_ = std::exchange(other.counted_, 0);
  return *this;
}

bool RequestBody::Append(std::string_view more, size_t limit) {
  const size_t needed = bytes_.size() + more.size();
  if (needed > bytes_.capacity()) {
    const size_t room = std::min(std::max(needed, bytes_.capacity() + bytes_.capacity() / 2), std::max(limit, needed));
    if (budget_ != nullptr && !budget_->Take(room - counted_)) return false;
    counted_ = room;
    // A string that grows by itself doubles, and would hold up to twice its limit.
    std::string larger;
    larger.reserve(room);
    larger += bytes_;
    bytes_.swap(larger);
  }
  bytes_ += more;
  return true;
}

// Assigning an empty string would keep the buffer.
void RequestBody::Free() {
  std::string().swap(bytes_);
  if (budget_ != nullptr) budget_->Give(counted_);
  counted_ = 0;
}

}  // namespace dovetail::server
