#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/cuda/state/state_args.h"
#include "kernels/cuda/state/state_pack_args.h"
#include "proto/attention_spec.h"
#include "proto/state_blocks.h"

namespace dovetail::compute {

// The blocks of a linear group on a compute worker's GPU: each head's block of 64 tokens in one piece.
struct StateShapeOnGpu {
  kernels::cuda::StateLaunch launch;  // but for what a step and an op bring
  kernels::cuda::StatePackLaunch pack;
  int64_t block_bytes = 0;  // of one head

  // kUnimplemented, kInvalidArgument: this GPU's kernels have no such state.
  static absl::StatusOr<StateShapeOnGpu> Of(const proto::LinearSpec& spec);
};

// What the kernels do for one linear group of a step: numbers and offsets only, the same for all ops of the group. Runs
// of `jobs` are named by first and count; their blocks, and entries of `blocks`, are offsets into the memory for blocks
// until Place adds where that lies.
// Threads: thread-compatible.
struct StatePlan {
  struct Jobs {
    int64_t first = 0;
    int32_t count = 0;
  };
  // Packed states of one shard: between `at` of the packed memory and the item of a part.
  struct Crossing {
    int part = 0, item = 0;
    int64_t at = 0, bytes = 0;
  };
  struct Entry {
    StateEntry state;
    Jobs before, after;  // all heads one after the other, as slots and other ranks have them
    int64_t before_bytes = 0, after_bytes = 0;
  };
  // Entries that run at once.
  struct Wave {
    std::vector<Entry> entries;
    Jobs fetched, left;  // of the crossings
    std::vector<Crossing> fetches, leaves;
    int64_t arriving_bytes = 0, leaving_bytes = 0;
    int64_t first_item = 0, first_unit = 0;
    int32_t units = 0, most_chunks = 0;
  };

  std::vector<Wave> waves;
  std::vector<kernels::cuda::StateItem> items;
  std::vector<kernels::cuda::StateUnit> units;
  std::vector<int64_t> blocks;  // [item][block]: offset of its first head, or kNotKept
  std::vector<kernels::cuda::StatePackJob> jobs;
  std::vector<int64_t> job_blocks;  // by job: offset of its block
  int64_t block_bytes = 0;          // of the memory for blocks, over all waves
  static constexpr int64_t kNotKept = -1;

  // For the StateEntries of the plan that `core` runs in this micro-batch. Entries of more than `most_bytes` of blocks
  // run one after the other.
  void Make(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, const StateShapeOnGpu& shape,
            const StepWire& wire, int64_t most_bytes);

 private:
  struct Builder;
};

}  // namespace dovetail::compute
