#pragma once
#include <deque>
#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/thread_name.h"

namespace dovetail::server {

// The engine must not be called from a sink: what updates ask of it is done on this thread.
// Threads: thread-safe.
class EngineCalls {
 public:
  EngineCalls() : thread_([this] { Run(); }) {}
  ~EngineCalls() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  void Post(std::function<void()> call) {
    {
      const MutexLock lock(mutex_);
      calls_.push_back(std::move(call));
    }
    wake_.notify_all();
  }
  // Done every kInterval, and after calls.
  void SetPeriodic(std::function<void()> work) {
    const MutexLock lock(mutex_);
    periodic_ = std::move(work);
  }

 private:
  static constexpr absl::Duration kInterval = absl::Milliseconds(200);

  void Run() {
    NameThread("dt-grpc-calls");
    MutexLock lock(mutex_);
    while (!stopping_ || !calls_.empty()) {
      if (calls_.empty()) wake_.wait_for(lock, absl::ToChronoMilliseconds(kInterval));
      std::deque<std::function<void()>> taken;
      taken.swap(calls_);
      const std::function<void()> periodic = periodic_;
      lock.unlock();
      for (auto& call : taken) call();
      if (periodic) periodic();
      lock.lock();
    }
  }

  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> periodic_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace dovetail::server
