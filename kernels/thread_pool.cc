#include "kernels/thread_pool.h"

#include <immintrin.h>

#include <chrono>

#include "base/check.h"
#include "base/thread_name.h"

namespace dovetail::kernels {
namespace {

constexpr int kPausesPerLook = 32;  // about a microsecond between two looks at the clock

uint64_t TasksOf(uint64_t job) { return job >> 32; }
uint64_t NextOf(uint64_t job) { return job & 0xffffffffu; }

}  // namespace

ThreadPool::ThreadPool(const ThreadPoolOptions& options) : threads_(options.threads), spin_us_(options.spin_us) {
  DT_CHECK(options.threads >= 1 && options.threads <= kMaxThreads, options.threads);
  DT_CHECK(options.spin_us >= 0, options.spin_us);
  workers_.reserve(threads_ - 1);
  for (int i = 1; i < threads_; ++i)
    workers_.emplace_back([this, i] {
      NameThread("dt-pool-" + std::to_string(i));
      WorkerLoop();
    });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  {
    MutexLock lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int tasks, Task task) {
  DT_CHECK(tasks >= 0 && tasks < kMaxTasks, tasks);
  const bool alone = tasks <= 1 || threads_ == 1 || busy_.exchange(true, std::memory_order_acquire);
  if (alone) {
    for (int i = 0; i < tasks; ++i) task(i);
    return;
  }
  task_ = &task;
  done_.store(0, std::memory_order_relaxed);
  // seq_cst here and in SleepUntilWork: either we see the sleeper, or it sees the job.
  job_.store(static_cast<uint64_t>(tasks) << 32, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    MutexLock lock(mutex_);
    wake_.notify_all();
  }
  RunClaimedTasks();
  // The others are inside their last task. One that lost its core is waited for by yielding ours.
  for (int looks = 0; done_.load(std::memory_order_acquire) != tasks; ++looks) {
    if (looks < 64 * kPausesPerLook) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }
  busy_.store(false, std::memory_order_release);
}

bool ThreadPool::HasWork() const {
  const uint64_t job = job_.load(std::memory_order_seq_cst);
  return NextOf(job) < TasksOf(job);
}

// Claims and runs tasks until none is left; false if there was none. The look before the claim
// keeps idle threads from adding to the word.
bool ThreadPool::RunClaimedTasks() {
  bool any = false;
  while (HasWork()) {
    const uint64_t job = job_.fetch_add(1, std::memory_order_acq_rel);
    if (NextOf(job) >= TasksOf(job)) break;
    (*task_)(static_cast<int>(NextOf(job)));
    done_.fetch_add(1, std::memory_order_release);
    any = true;
  }
  return any;
}

void ThreadPool::WorkerLoop() {
  using std::chrono::steady_clock;
  while (!stop_.load(std::memory_order_relaxed)) {
    RunClaimedTasks();
    const auto deadline = steady_clock::now() + std::chrono::microseconds(spin_us_);
    bool work = false;
    do {
      for (int i = 0; i < kPausesPerLook && !(work = HasWork()); ++i) _mm_pause();
      if (!work) std::this_thread::yield();
    } while (!work && !stop_.load(std::memory_order_relaxed) && steady_clock::now() < deadline);
    if (!work) SleepUntilWork();
  }
}

void ThreadPool::SleepUntilWork() {
  MutexLock lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [this] { return stop_.load() || HasWork(); });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace dovetail::kernels
