#include "control/node_loop.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread_name.h"

namespace dovetail::control {
namespace {
constexpr absl::Duration kLongestSleep = absl::Milliseconds(500);
}

NodeLoop::NodeLoop(transport::Connector& connector, transport::Connector* second)
    : connector_(connector),
      second_(second),
      turn_began_us_(absl::ToUnixMicros(SystemClock().Now())),
      thread_([this] { Run(); }) {}

NodeLoop::~NodeLoop() { Stop(); }

bool NodeLoop::Post(std::function<void()> work) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return false;
    posted_.push_back(std::move(work));
  }
  connector_.Wake();
  return true;
}

bool NodeLoop::Call(const std::function<void()>& work) {
  Mutex mutex;
  CondVar done;
  bool finished = false;
  const bool posted = Post([&] {
    work();
    MutexLock lock(mutex);
    finished = true;
    done.notify_one();
  });
  if (!posted) return false;
  MutexLock lock(mutex);
  done.wait(lock, [&] { return finished; });
  return true;
}

void NodeLoop::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  connector_.Wake();
  if (thread_.joinable()) thread_.join();
}

absl::Duration NodeLoop::TakeBusiest() {
  const int64_t began = turn_began_us_.load(std::memory_order_relaxed);
  const int64_t at_hand = absl::ToUnixMicros(SystemClock().Now()) - began;
  return absl::Microseconds(std::max({at_hand, busiest_us_.exchange(0), int64_t{0}}));
}

void NodeLoop::BeginTurn(absl::Time now) {
  const int64_t now_us = absl::ToUnixMicros(now);
  const int64_t took = now_us - turn_began_us_.load(std::memory_order_relaxed);
  for (int64_t busiest = busiest_us_.load(); took > busiest && !busiest_us_.compare_exchange_weak(busiest, took);) {
  }
  turn_began_us_.store(now_us, std::memory_order_relaxed);
}

void NodeLoop::Sleep(absl::Duration length) {
  if (second_ != nullptr) return connector_.WaitTogether(*second_, length);
  connector_.Wait(length);
}

void NodeLoop::Run() {
  NameThread("dt-loop");
  std::vector<std::function<void()>> taken;
  while (true) {
    BeginTurn(SystemClock().Now());
    bool stop = false;
    {
      MutexLock lock(mutex_);
      taken.swap(posted_);
      stop = stopping_;
    }
    for (auto& work : taken) work();
    const bool worked = !taken.empty();
    taken.clear();
    if (stop) return;
    if (node_.turn && node_.turn() > 0) continue;
    if (worked) continue;
    const absl::Time now = SystemClock().Now();
    absl::Duration sleep = kLongestSleep;
    if (node_.next_deadline) sleep = std::min(sleep, node_.next_deadline() - now);
    BeginTurn(now);  // so that what the last one took counts
    turn_began_us_.store(absl::ToUnixMicros(now + std::max(sleep, absl::ZeroDuration())), std::memory_order_relaxed);
    if (sleep > absl::ZeroDuration()) Sleep(sleep);
  }
}

}  // namespace dovetail::control
