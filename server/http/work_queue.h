#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dovetail::server {

// A few threads that do what would hold up an I/O thread: parsing, rendering, tokenising. The queue is bounded: TryPost
// says no when it is full, and the caller answers that the server is busy. Thread-safe.
class WorkQueue {
 public:
  WorkQueue(int threads, int max_queued);
  ~WorkQueue();  // Stop()

  bool TryPost(std::function<void()> task);
  void Stop();  // drops what has not begun, joins

 private:
  void Run();

  const size_t max_queued_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace dovetail::server
