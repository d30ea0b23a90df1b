#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::spatio_temporal {

// What the ranks of one process tell each other while they enqueue: behind which event what one has sent lies in the
// other's memory. A stream may wait for an event only after it was recorded, so a rank's thread waits here for the
// sender's thread; neither waits for a GPU.
// Threads: thread-safe.
class RankBoard {
 public:
  using Event = std::shared_ptr<const kernels::cuda::CudaEvent>;

  // `stall`: how long a thread waits at most for another.
  RankBoard(int ranks, absl::Duration stall);

  // The first `frames` of what `source` sends to `destination` in `stage` are there when `event` has come. Stages, and
  // frames within one, only grow.
  void Tell(int source, int destination, int64_t stage, int64_t frames, Event event);
  // Blocks until that is told. Stages and frames only grow. kUnavailable: a rank has failed, or told nothing in time.
  absl::StatusOr<Event> Await(int source, int destination, int64_t stage, int64_t frames);

  // Blocks until every rank has come here as often. Errors: as Await.
  absl::Status Meet(int rank);

  // Ends all waits, now and later. The first failure counts.
  void Fail(int rank, const absl::Status& status);

 private:
  struct Told {
    int64_t stage = 0;
    int64_t frames = 0;
    Event event;
  };
  template <typename Ready>
  absl::Status WaitUntil(MutexLock& lock, int rank, const char* what, Ready ready)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int ranks_;
  const absl::Duration stall_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::deque<Told>> told_ ABSL_GUARDED_BY(mutex_);  // [source][destination]
  std::vector<int64_t> met_ ABSL_GUARDED_BY(mutex_);            // by rank: how often
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::spatio_temporal
