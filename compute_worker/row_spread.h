#pragma once
#include <vector>

#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// Whose the rows of a step are, where every sequence lies whole on one attention worker: those of a worker's part are
// its payloads' rows, in the order of the step. K and V of all of them go there. Those of a prompt that is attended
// here, all of it, are no rows of q and o. SpreadRows keeps the capacity.
// Threads: thread-compatible.
struct RowSpread {
  struct Row {
    int part = 0;  // index among ComputeWorkerCore::PartsOf
    int row = 0;   // among the part's own
  };
  // Rows of the step that follow each other in the payloads, too.
  struct Run {
    int part = 0;
    bool attended_here = false;
    int64_t first_row = 0;  // of the step
    int64_t count = 0;
    int64_t query_row = 0, key_value_row = 0;  // where the first one is among the part's q and o, and k and v
  };
  std::vector<Row> rows;       // by row of the step
  std::vector<Run> runs;       // all rows, in the order of the step
  std::vector<int> part_rows;  // how many of them, by part
  std::vector<int> entry_part;
};

// False: there is a sequence whose heads, tokens or layer groups are divided among workers, or which is attended
// neither wholly on its worker nor wholly here. `spread` is then unspecified.
bool SpreadRows(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread);

// Whether a step between GPUs crosses as lists of copies (divided_rows.h), of whole sequences, too: gates of linear
// states are no rows of `spread`. False: it is as SpreadRows says.
bool CrossesAsDivided(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread);

}  // namespace dovetail::compute
