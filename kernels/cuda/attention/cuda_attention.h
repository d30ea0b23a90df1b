#pragma once
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/attention/attention_plan.h"
#include "kernels/cuda/attention/prefill_plan.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Paged attention on a GPU: what paged_attention.h computes, for q_rows of 1 to thousands. Two kernels share a step's
// items: one for few rows, which deals out KV blocks (attention_kernel.cuh), and on Hopper one for many, which deals
// out rows, and KV blocks too where these are few for a GPU (prefill_plan.h, prefill_kernel.cuh): one size of head, 64,
// 80, 96, 128 or 256, q and o of one type of 16 bits, K and V of that or of 8 bits, all of whose blocks lie in one
// arena, and o at multiples of eight elements. What the second does not take is the first's, and so is everything on
// other GPUs. Not bit-equal to the CPU (docs/ARCHITECTURE.md, determinism): sums run in another order and weights are
// rounded to the type of the products. For one plan the bits are always the same.

// What is equal for all layers and items of a step.
struct CudaAttentionShape {
  int group = 1;  // query heads per KV head, 1..256
  int window = 0;
  CudaKvLayout layout;
  WireType q_type = WireType::kBF16;
  WireType o_type = WireType::kBF16;
  float scale = 0;      // > 0
  float key_scale = 1;  // what stored keys and values are to be multiplied by
  float value_scale = 1;
  // All blocks of all items lie in this memory, behind its first CudaKvLayout::kArenaLead bytes and on multiples of 256
  // bytes from its beginning; null: anywhere.
  const std::byte* arena = nullptr;
  size_t arena_bytes = 0;
};

// One shard of one sequence. Pointers are device pointers and must stay valid until the last Run of the plan has
// finished.
struct CudaAttentionItem {
  int32_t q_rows = 0;
  int32_t kv_heads = 0;
  int64_t first_position = 0;
  int64_t token_begin = 0;  // a multiple of 64
  int64_t token_end = 0;
  int64_t q_offset = 0;  // elements from Run's q; a multiple of 8
  int64_t q_row_step = 0;
  int64_t o_offset = 0;  // elements from Run's o; even
  int64_t o_row_step = 0;
  const std::byte* const* blocks = nullptr;  // as KvBlockTable: head_step, first_segment
  int64_t head_step = 0;
  int32_t first_segment = 0;
  const float* sinks = nullptr;  // [kv_heads * group] or null; not for partial items
  // Writes its rows' subtrees (paged_attention.h) to Run's partial_o and partial_ml instead of o: PartialNodes(...)
  // of them from subtree `first_node` on. The first subtree of a row carries everything, the others nothing.
  bool partial = false;
  int32_t first_node = 0;
  // Each row has one subtree, which carries everything: q_rows of them. For results that stay on the GPU.
  bool node_a_row = false;
};

struct CudaAttentionRun {
  const void* q = nullptr;
  void* o = nullptr;
  float* partial_o = nullptr;
  float* partial_ml = nullptr;
  size_t kv_offset_bytes = 0;
};

// The plan of one step and the device memory that it lies in.
// Ownership: must not outlive the device.
// Threads: thread-compatible.
class CudaAttention {
 public:
  // Which kernel attends items that both could: the faster one, or always the same. kForManyRowsWhole: and no thread
  // blocks share a tile.
  // kBatchInvariant: that for many rows, with keys in fixed pieces (PlanFixedPrefill), so that a row's bits
  // depend on its query and on what it sees only; Plan returns kFailedPrecondition for what that kernel does not take.
  enum class Kernel { kFaster, kForFewRows, kForManyRows, kForManyRowsWhole, kBatchInvariant };

  explicit CudaAttention(CudaDevice& device, Kernel kernel = Kernel::kFaster);

  // kFailedPrecondition, saying why: of such heads, or on this GPU, kBatchInvariant is not to be had.
  absl::Status CheckInvariant(const CudaAttentionShape& shape) const;

  // Plans a step and enqueues its upload. Memory grows to the largest plan so far: kResourceExhausted if it is not
  // there. kInvalidArgument, naming the item, for what the contract refuses. Waits, on the host, only for the upload of
  // four plans ago.
  absl::Status Plan(CudaStream& stream, const CudaAttentionShape& shape, std::span<const CudaAttentionItem> items);
  // Enqueues one layer. The shape may differ from the plan's in scale, key_scale and value_scale only.
  absl::Status Run(CudaStream& stream, const CudaAttentionShape& shape, const CudaAttentionRun& run);

  // What launches of the plan depend on, other than the contents of memory: addresses, grid and tiles.
  uint64_t Launches() const;

  const AttentionPlan& plan() const { return plan_; }                // of the kernel for few rows
  const PrefillPlan& prefill_plan() const { return prefill_plan_; }  // of the one for many; no tiles: it has no items
  // The plan's items on the device, in their order: what KvAppendLaunch::items takes. Valid until the next Plan.
  const DeviceAttentionItem* device_items() const { return items_; }

 private:
  struct Staging {
    std::unique_ptr<Buffer> host;
    CudaEvent copied;
  };

  absl::Status PlanMany(CudaStream& stream, const CudaAttentionShape& shape, std::span<const PrefillItem> items);
  absl::Status RunMany(CudaStream& stream, const CudaAttentionShape& shape, const AttentionCall& call) const;
  bool Takes(const CudaAttentionShape& shape) const;
  // Which items the kernel for many rows attends.
  std::vector<bool> Choose(const CudaAttentionShape& shape, std::span<const CudaAttentionItem> items,
                           std::span<const PlannedItem> planned) const;
  absl::Status Upload(CudaStream& stream, std::span<const CudaAttentionItem> items, int window);
  absl::Status GrowPieces(CudaStream& stream, int tiles, int value_dim);
  absl::Status GrowTilePieces(CudaStream& stream, int value_dim);
  int64_t TilePieceRows() const;

  CudaDevice& device_;
  const Kernel kernel_;
  AttentionPlan plan_;
  PrefillPlan prefill_plan_;
  std::array<Staging, 4> staging_;
  int next_staging_ = 0;
  std::unique_ptr<Buffer> plan_memory_;  // extent, items, spans, parts, first nodes, joins, tiles
  std::unique_ptr<Buffer> piece_o_, piece_ml_, arrived_;
  std::unique_ptr<Buffer> tile_pieces_;  // PrefillLaunch's piece_ml and piece_o
  std::unique_ptr<Buffer> fold_;         // PrefillLaunch's
  bool folds_ = false;                   // the plan's launches have it
  AttentionExtent* extent_ = nullptr;    // these in plan_memory_
  DeviceAttentionItem* items_ = nullptr;
  AttentionSpan* spans_ = nullptr;
  AttentionPart* parts_ = nullptr;
  int32_t* first_tile_ = nullptr;
  PrefillJoin* joins_ = nullptr;
  PrefillTile* tiles_ = nullptr;
};

}  // namespace dovetail::kernels::cuda
