#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "requests/generation.h"

namespace dovetail::server {

class Generation;

// Carries updates from the engine's thread to one I/O thread. However many updates a step brings, the I/O thread is
// woken once. Outlives the I/O thread's context in the sinks that the engine still holds: closed, it drops what comes.
// Threads: thread-safe.
class UpdateInbox : public std::enable_shared_from_this<UpdateInbox> {
 public:
  // `post` runs a task on the I/O thread.
  explicit UpdateInbox(std::function<void(std::function<void()>)> post) : post_(std::move(post)) {}

  void Push(std::shared_ptr<Generation> to, int prompt, requests::GenerationUpdate update);
  void Close();

 private:
  struct Item {
    std::shared_ptr<Generation> to;
    int prompt;
    requests::GenerationUpdate update;
  };
  void Deliver();

  Mutex mutex_;
  std::function<void(std::function<void()>)> post_ ABSL_GUARDED_BY(mutex_);  // empty: closed
  std::vector<Item> items_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
