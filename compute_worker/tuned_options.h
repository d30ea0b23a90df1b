#pragma once
#include "compute_worker/compute_worker_node.h"

namespace dovetail::compute {

// What a worker's core is told: `options`, with what its device does with prompts, as far as `tuning` lets it. On a GPU
// that has an attention worker of this process, too, prompts are attended where the blocks are. So are those of steps
// that may go from GPU to GPU, unless a scratch is asked for, and all of a deterministic worker.
//   Threads: pure, except that the device is asked for its free memory
ComputeWorkerOptions Tuned(ComputeWorkerOptions options, const ComputeWorkerTuning& tuning,
                           const proto::AttentionTable& table);

}  // namespace dovetail::compute
