#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/attention/attention_plan.h"
#include "kernels/cuda/attention/prefill_args.h"

namespace dovetail::kernels::cuda {

// Which items of a step the kernel for many rows attends, and which thread block attends which of their tiles. Made on
// the host once a step from lengths alone; nothing is compiled or kept for a length.
// Threads: pure.

struct PrefillItem {
  PlannedItem rows;
  const std::byte* const* blocks = nullptr;  // on the device, as CudaAttentionItem's
  int64_t head_step = 0;
  int32_t first_segment = 0;
  int32_t item = 0;  // its number in the step
};

// Tiles that are attended together, and the joins of their pieces.
struct PrefillPass {
  int32_t first_tile = 0;  // where the plan's first_tile has the pass's [grid + 1]
  int32_t first_join = 0, joins = 0;
};

struct PrefillPlan {
  std::vector<PrefillTile> tiles;
  std::vector<int32_t> first_tile;  // [passes][grid + 1]
  std::vector<PrefillJoin> joins;   // of the tiles that are divided
  std::vector<PrefillPass> passes;  // one after the other: each uses the memory of pieces again
  int32_t pieces = 0;               // that a pass has at most
  int32_t grid = 0;
};

// Below so many (token, head) rows a tile would be more than half empty.
inline constexpr int64_t kLeastPrefillRows = 65;

// A step has so many pieces at most, for each multiprocessor: what memory they take is known before.
inline constexpr int kMostPieces = 3;

// How many pieces a pass of PlanFixedPrefill has for each multiprocessor, unless a single tile has more.
inline constexpr int32_t kFixedPieces = 4;

// For each item, whether the kernel for many rows is the faster one: it attends at twice the rate of the other.
std::vector<bool> ChoosePrefill(std::span<const PlannedItem> items, int group);

// Tiles of 128 rows, dealt out such that thread blocks end together: the longest come first, each goes to the thread
// block that has least to do. Heads whose keys fill the L2 come one after the other. `token_bytes`: of a token's key
// and value of one head.
//   Division: a tile has all keys that its rows see. Where thread blocks would end together much sooner if the longest
//             were shorter (a short part of a prompt behind many earlier tokens), those longer than some number of
//             blocks are divided into equal pieces. The division depends on the step's lengths only.
//             most_pieces: for each multiprocessor, at most kMostPieces; 0: no tile is divided.
//   Errors:   kInvalidArgument for more than 2^24 tiles.
absl::StatusOr<PrefillPlan> PlanPrefill(std::span<const PrefillItem> items, int group, int window, int multiprocessors,
                                        int token_bytes, int most_pieces = kMostPieces);

// The same for fixed pieces of kFixedPieceBlocks: a row's bits depend on its query and on what it sees only, so they
// are equal for a prompt at once, in parts and token by token. A tile has all its keys, which its thread block folds
// piece by piece; where that leaves thread blocks without work, each of its pieces is stored, and they are folded then.
//   step_blocks: that the kernel attends at once (PrefillStepBlocks): steps begin on multiples of them.
//   Errors:      as above.
absl::StatusOr<PrefillPlan> PlanFixedPrefill(std::span<const PrefillItem> items, int group, int window,
                                             int multiprocessors, int token_bytes, int step_blocks);
// Whether any tile has more than one fixed piece, stored or not.
bool HasFixedPieces(const PrefillPlan& plan);

}  // namespace dovetail::kernels::cuda
