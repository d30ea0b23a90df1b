#pragma once
#include <condition_variable>
#include <mutex>

#include "engine/engine.h"

namespace dovetail::server::test {

// Holds the engine's thread at its `at`-th token until let go, so that what comes later is after a certain moment.
class HoldingSink : public engine::GenerationSink {
 public:
  explicit HoldingSink(size_t at) : at_(at) {}

  void OnUpdate(requests::GenerationUpdate update) override {
    std::unique_lock lock(mutex_);
    tokens_ += update.tokens.size();
    finished_ = finished_ || update.request_finished;
    reason_ = update.reason;
    changed_.notify_all();
    if (tokens_ >= at_ && !let_go_) changed_.wait(lock, [this] { return let_go_; });
  }
  void WaitUntilHeld() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tokens_ >= at_; });
  }
  void LetGo() {
    std::lock_guard lock(mutex_);
    let_go_ = true;
    changed_.notify_all();
  }
  void WaitForEnd() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return finished_; });
  }
  size_t tokens() {
    std::lock_guard lock(mutex_);
    return tokens_;
  }
  requests::FinishReason reason() {
    std::lock_guard lock(mutex_);
    return reason_;
  }

 private:
  const size_t at_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t tokens_ = 0;
  bool finished_ = false, let_go_ = false;
  requests::FinishReason reason_ = requests::FinishReason::kStop;
};

}  // namespace dovetail::server::test
