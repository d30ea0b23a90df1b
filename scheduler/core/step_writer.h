#pragma once
#include <cstddef>

#include "base/ids.h"
#include "proto/step_plan.h"
#include "scheduler/core/block_names.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// Writes the entries of a step: what a compute worker must be told about each sequence in it. It keeps count of what
// the step gives the worker to remember (token histories, lists of the sampling), at most kMaxBytesGiven.
// Threads: thread-compatible.
class StepWriter {
 public:
  explicit StepWriter(const BlockNames& names) : names_(names) {}  // outlives the writer

  // The entries that follow are of a step for this worker.
  void Begin(WorkerId compute_worker);
  WorkerId compute_worker() const { return compute_worker_; }

  // Whether the step may still give the worker what it needs for this sequence, which then counts as given.
  bool MayGive(const Sequence& sequence);

  // Where the new tokens begin, and up to where blocks are named.
  struct Chunk {
    Position ctx_len = 0;
    Position named_until = 0;
    bool ahead = false;  // the token is being drawn by the step in flight
    proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  };
  // Writes `entry` for the sequence's `planned` tokens, and remembers in `planned` what its result will be about. The
  // sequence then counts as in flight, and its tenant as served.
  // entry: default-constructed.
  void Write(Sequence& sequence, const Chunk& chunk, proto::StepEntry& entry, PlannedEntry& planned);

 private:
  size_t BytesToGive(const Sequence& sequence) const;
  void WriteSampling(Sequence& sequence, bool ahead, proto::StepEntry& entry) const;

  const BlockNames& names_;
  WorkerId compute_worker_;
  size_t given_left_ = 0;  // bytes that may still be given in the step
};

}  // namespace dovetail::scheduler
