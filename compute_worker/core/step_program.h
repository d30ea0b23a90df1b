#pragma once
#include <vector>

namespace dovetail::compute {

// A step through a model as a straight line of stages: dense pieces, cut at attention. Built once from the model's
// typed layer steps (ProgramOf in compute_worker/cpu/dense_executor.h).
// Threads: immutable once built.
enum class StageKind {
  kDense,          // run dense piece `index`
  kSendQuery,      // send q of attention op `index` to the workers of its layer group
  kSendKeyValue,   // send its k and v
  kAttendPrompts,  // attend prompts of op `index` here, as far as their K and V are here
  kAwaitPartials,  // wait for what attention gave
};

struct Stage {
  StageKind kind;
  int index = 0;
};

using StepProgram = std::vector<Stage>;

}  // namespace dovetail::compute
