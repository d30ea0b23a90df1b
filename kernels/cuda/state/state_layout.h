#pragma once
#include "kernels/cuda/state/state_args.h"
#include "kernels/linear_state.h"

namespace dovetail::kernels::cuda {

// How a head's state block lies in pieces of `piece_bytes`; .pieces is 0 if a row does not fit. Takes no more pieces
// than LinearStateLayout does: parts in the same order, and no row is longer.
// Threads: pure.
StateLayout LayOutState(const LinearStateShape& shape, size_t piece_bytes);

// From row to row of the two forms, in host memory: what a block holds moves between a GPU and CPUs. `tokens`: how many
// of the block's tokens are filled; with 64 its state is, too. S midway stays behind: a GPU makes it again. Keys,
// values and decays lose what 16 bits do not hold. Both lie in host memory of the caller.
// Threads: reentrant.
void StateToCpu(const LinearStateShape& shape, int tokens, std::byte* const* from, std::byte* const* to,
                size_t piece_bytes);
void StateFromCpu(const LinearStateShape& shape, int tokens, std::byte* const* from, std::byte* const* to,
                  size_t piece_bytes);

}  // namespace dovetail::kernels::cuda
