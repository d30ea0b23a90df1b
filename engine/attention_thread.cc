#include "engine/attention_thread.h"

#include <utility>

#include "base/thread_name.h"
#include "engine/idle_spin.h"

namespace dovetail::engine {

AttentionThread::AttentionThread(std::vector<attention::AttentionWorkerNode*> nodes, transport::Doorbell& frames,
                                 transport::Doorbell& engine)
    : nodes_(std::move(nodes)), frames_(frames), engine_(engine), clock_(SystemClock()) {
  Publish();
  thread_ = std::thread([this] { Run(); });
}

AttentionThread::~AttentionThread() {
  stopping_.store(true, std::memory_order_release);
  frames_.Ring();
  thread_.join();
}

std::vector<AttentionThread::State> AttentionThread::states() const {
  MutexLock lock(mutex_);
  return states_;
}

absl::Status AttentionThread::health() const {
  MutexLock lock(mutex_);
  return health_;
}

AttentionThread::State AttentionThread::StateOf(const attention::AttentionWorkerNode& node) {
  const auto status = node.core().status();
  return {status.blocks_total, status.blocks_in_use, status.blocks_cached, node.core().counters().damaged_blocks};
}

void AttentionThread::Publish() {
  std::vector<State> states;
  for (const attention::AttentionWorkerNode* node : nodes_) states.push_back(StateOf(*node));
  MutexLock lock(mutex_);
  states_.swap(states);
}

void AttentionThread::Run() {
  NameThread("dt-attention");
  IdleSpin spin(clock_);
  while (!stopping_.load(std::memory_order_acquire)) {
    int handled = 0;
    for (attention::AttentionWorkerNode* node : nodes_) {
      handled += node->Poll();
      if (absl::Status health = node->Health(); !health.ok()) {
        MutexLock lock(mutex_);
        health_ = std::move(health);
        engine_.Ring();
        return;
      }
    }
    if (handled > 0) {
      Publish();
      spin.Worked();
      continue;
    }
    if (spin.GoesOn()) continue;
    frames_.Wait(absl::Milliseconds(500));
  }
}

}  // namespace dovetail::engine
