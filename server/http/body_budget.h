#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace dovetail::server {

// The bytes that the bodies of all connections may hold together. Only bytes that came are counted, with what their
// buffers reserve: a client that announces a long body and sends none of it takes nothing.
// Threads: thread-safe.
class BodyBudget {
 public:
  explicit BodyBudget(size_t max_bytes) : max_bytes_(max_bytes) {}

  bool HasRoom(size_t bytes) const;  // at this moment; nothing is reserved
  size_t held() const { return held_.load(std::memory_order_relaxed); }

 private:
  friend class RequestBody;
  bool Take(size_t bytes);
  void Give(size_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }

  const size_t max_bytes_;
  std::atomic<size_t> held_{0};
};

// The bytes of one body, counted in a budget for as long as they are held.
// Threads: thread-compatible; a value.
class RequestBody {
 public:
  RequestBody() = default;  // counted nowhere
  explicit RequestBody(std::shared_ptr<BodyBudget> budget) : budget_(std::move(budget)) {}
  RequestBody(RequestBody&& other) noexcept;
  RequestBody& operator=(RequestBody&& other) noexcept;
  ~RequestBody() { Free(); }

  // False, and nothing changes, where the budget has no room. The buffer grows by half, and to at most `limit` bytes,
  // which the body as a whole must not exceed.
  bool Append(std::string_view more, size_t limit);
  void Free();  // the memory too

  const std::string& bytes() const { return bytes_; }

 private:
  std::shared_ptr<BodyBudget> budget_;  // bodies may outlive the server's connections
  std::string bytes_;
  size_t counted_ = 0;
};

}  // namespace dovetail::server
