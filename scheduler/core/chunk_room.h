#pragma once
#include <span>

#include "scheduler/core/compute_pool.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// How long the next part of a prompt may take, by --prefill-itl-budget: what is asked of chunk_budget.h, for the
// streams and prompts that there are.
// Threads: thread-compatible; deterministic.
class ChunkRoom {
 public:
  // All outlive this.
  ChunkRoom(const SchedulerOptions& options, const ComputePool& pool, const MicroBatches& batches, const Turn& turn)
      : options_(options), pool_(pool), batches_(batches), turn_(turn) {}

  // Seconds that it may take on these compute workers, together; infinity: no stream waits for it, or there is no
  // budget. A prompt whose rates are known and that has no time of its own yet gets one (Sequence::prefill_due).
  //   on_plane:     attention workers need most of that time, for which streams of all compute workers wait
  //   with_streams: it is in a step with them, of which it has what hides (StreamPace)
  double For(std::span<const WorkerId> workers, bool on_plane, bool with_streams) const;

  // Time between two tokens of this worker's streams without prompts, in seconds; 0: it has none, or that is not known.
  double StreamSeconds(WorkerId worker) const;

 private:
  bool HasStreams(WorkerId worker) const;
  int PromptsIn(WorkerId worker) const;
  double ShareOf(std::span<const WorkerId> workers) const;
  template <typename Visit>
  void ForEachMember(WorkerId worker, Visit visit) const;

  const SchedulerOptions& options_;
  const ComputePool& pool_;
  const MicroBatches& batches_;
  const Turn& turn_;
};

}  // namespace dovetail::scheduler
