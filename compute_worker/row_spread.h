#pragma once
#include <vector>

#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// Whose the rows of a step are, where every sequence lies whole on one attention worker: those of a worker's part are
// its payloads' rows, in the order of the step. A value; SpreadRows keeps the capacity. Thread-compatible.
struct RowSpread {
  struct Row {
    int part = 0;  // index among ComputeWorkerCore::PartsOf
    int row = 0;   // among the part's own
  };
  std::vector<Row> rows;       // by row of the step
  std::vector<int> part_rows;  // how many of them, by part
  std::vector<int> entry_part;
};

// False: there is a sequence whose heads, tokens or layer groups are divided among workers, or not all of which is
// attended by one. `spread` is then unspecified.
bool SpreadRows(const ComputeWorkerCore& core, MicroBatchId id, RowSpread& spread);

}  // namespace dovetail::compute
