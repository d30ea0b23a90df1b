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
  int32_t grid = 0;
};

// Below so many (token, head) rows a tile would be more than half empty.
inline constexpr int64_t kLeastPrefillRows = 65;

// For each item, whether the kernel for many rows is the faster one: it attends at twice the rate of the other, but
// divides no row's keys, so that a few rows of a long context would occupy a few multiprocessors only.
std::vector<bool> ChoosePrefill(std::span<const PlannedItem> items, int group, int window, int multiprocessors);

// Tiles of 128 rows, each with all keys that its rows see, dealt out such that thread blocks end together: the longest
// come first, each goes to the thread block that has least to do. Heads whose keys fill the L2 come one after the
// other. `token_bytes`: of a token's key and value of one head. kInvalidArgument for more than 2^24 tiles.
absl::StatusOr<PrefillPlan> PlanPrefill(std::span<const PrefillItem> items, int group, int window, int multiprocessors,
                                        int token_bytes);

}  // namespace dovetail::kernels::cuda
