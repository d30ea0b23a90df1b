#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "attention_worker/attention_worker_node.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "transport/doorbell.h"

namespace dovetail::engine {

// Runs the event loops of attention workers on a CPU, where layers run on GPUs: what drives the GPUs must not wait for
// K and V of prompts to be stored. Between two ops it looks for frames for some time before it sleeps.
// Errors: health() is that of the first worker that failed; the thread has ended then.
// Threads: thread-safe. The nodes are its own until it is destroyed.
class AttentionThread {
 public:
  struct State {  // of a worker
    uint64_t blocks_total = 0, blocks_in_use = 0, blocks_cached = 0;
    uint64_t damaged_blocks = 0;
  };

  // All outlive it. `frames` rings when a frame is there for a node, `engine` is rung when a node has failed.
  AttentionThread(std::vector<attention::AttentionWorkerNode*> nodes, transport::Doorbell& frames,
                  transport::Doorbell& engine);
  ~AttentionThread();
  AttentionThread(const AttentionThread&) = delete;
  AttentionThread& operator=(const AttentionThread&) = delete;

  std::vector<State> states() const;  // by node, after its last frame
  absl::Status health() const;

  static State StateOf(const attention::AttentionWorkerNode& node);

 private:
  void Run();
  void Publish();

  const std::vector<attention::AttentionWorkerNode*> nodes_;
  transport::Doorbell& frames_;
  transport::Doorbell& engine_;
  Clock& clock_;
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  std::vector<State> states_ ABSL_GUARDED_BY(mutex_);
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dovetail::engine
