#include "server/work/work_queue.h"

#include "base/thread_name.h"

namespace dovetail::server {

WorkQueue::WorkQueue(int threads, const WorkLimits& limits) : tasks_(limits) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

WorkQueue::~WorkQueue() { Stop(); }

absl::Status WorkQueue::TryPost(WorkTask task) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    DT_RETURN_IF_ERROR(tasks_.Push(std::move(task)));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void WorkQueue::Cancel(CancelToken& token) {
  token.Cancel();
  std::optional<WorkTask> dropped;
  {
    MutexLock lock(mutex_);
    dropped = tasks_.Remove(token);
  }
}

bool WorkQueue::RunNext() {
  std::optional<WorkTask> task;
  {
    MutexLock lock(mutex_);
    task = tasks_.Pop();
  }
  if (task) task->run();
  return task.has_value();
}

int WorkQueue::waiting() const {
  MutexLock lock(mutex_);
  return tasks_.size();
}

void WorkQueue::Stop() {
  std::vector<WorkTask> dropped;
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    while (std::optional<WorkTask> task = tasks_.Pop()) dropped.push_back(*std::move(task));
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkQueue::Run() {
  NameThread("dt-reading");
  while (true) {
    {
      MutexLock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || tasks_.size() > 0; });
      if (stopping_) return;
    }
    RunNext();  // or another thread took it
  }
}

}  // namespace dovetail::server
