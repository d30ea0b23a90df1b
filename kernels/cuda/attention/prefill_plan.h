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

struct PrefillPlan {
  std::vector<PrefillTile> tiles;
  std::vector<int32_t> first_tile;  // [grid + 1]
  std::vector<PrefillJoin> joins;   // of the tiles that are divided
  int32_t pieces = 0;               // of these, at most kMostPieces for each multiprocessor
  int32_t grid = 0;
};

// Below so many (token, head) rows a tile would be more than half empty.
inline constexpr int64_t kLeastPrefillRows = 65;

// A step has so many pieces at most, for each multiprocessor: what memory they take is known before.
inline constexpr int kMostPieces = 3;

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

}  // namespace dovetail::kernels::cuda
