#pragma once
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/work/fair_queue.h"

namespace dovetail::server {

// A few threads that do what would hold up an I/O thread: parsing, rendering, tokenising. FairQueue decides which task
// is next. The queue is bounded, and a caller that is refused answers that the server is busy. What a task holds ends
// with it, and never under the queue's lock.
// Threads: thread-safe; a task must not call Stop().
class WorkQueue {
 public:
  // Without threads tasks run in RunNext() alone.
  WorkQueue(int threads, const WorkLimits& limits);
  ~WorkQueue();  // Stop()

  // As FairQueue::Push; kUnavailable after Stop().
  absl::Status TryPost(WorkTask task);

  // Cancels the token, and drops its task, which frees its place, unless it has begun.
  void Cancel(CancelToken& token);

  // Runs the next task on the caller's thread; false if none waits.
  bool RunNext();

  int waiting() const;
  void Stop();  // drops what has not begun, joins

 private:
  void Run();

  mutable Mutex mutex_;
  CondVar wake_;
  FairQueue tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace dovetail::server
