#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace dovetail::kernels {

struct ThreadPoolOptions {
  int threads = 1;  // including the thread that calls Run; 1..256
  // How long an idle thread watches for the next Run before it sleeps. A wake-up costs about 20 us,
  // the gap between two ops of a step about one. While it watches it offers its core to other
  // threads (sched_yield), so that network threads get their turn.
  int spin_us = 100;
};

// A fixed set of threads that share the work of one op. Creates its threads in the constructor, joins them in the
// destructor; Run allocates nothing.
// Threads: thread-safe.
class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256;
  static constexpr int kMaxTasks = 1 << 24;

  explicit ThreadPool(const ThreadPoolOptions& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls task(0) .. task(tasks - 1), each exactly once, on the caller and the pool's threads, and
  // returns when all have returned. Tasks are claimed in ascending order, one atomic add each, so
  // that a thread delayed by the system delays no more than its own task: make them about 2 us or
  // longer. What they write is visible to the caller afterwards. `tasks` is 0..kMaxTasks - 1. A
  // call from inside a task, or while another thread is in Run, runs all its tasks on its own
  // thread, in order. Which thread runs a task is not determined: results must not depend on it.
  // Tasks must not throw.
  void Run(int tasks, absl::FunctionRef<void(int task)> task);

 private:
  using Task = absl::FunctionRef<void(int)>;

  void WorkerLoop();
  bool RunClaimedTasks();
  void SleepUntilWork();
  bool HasWork() const;

  const int threads_;
  const int spin_us_;

  // One word is the whole state of a job, so that one fetch_add both claims a task and says whether
  // it exists: the number of tasks in the upper half, the next unclaimed index in the lower. A
  // thread that comes late adds to a job that is over, or joins the next one: both are harmless. A
  // claimed task keeps the job, and so `task_`, alive until `done_` counts it.
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<bool> busy_{false};
  const Task* task_ = nullptr;

  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  CondVar wake_;
  std::vector<std::thread> workers_;
};

}  // namespace dovetail::kernels
