#pragma once
#include <cuda.h>

#include <type_traits>

#include "kernels/cuda/attention/prefill_args.h"
#include "kernels/cuda/primitives/pipeline.cuh"
#include "kernels/cuda/primitives/primitives.cuh"

// Sizes, shared memory and steps of the attention kernel for many rows (prefill_kernel.cuh).

namespace dovetail::kernels::cuda {

// Bytes from one to the next of the map's outermost coordinate: rows of heads of so many dimensions begin on them.
__host__ __device__ constexpr int PrefillUnit(int dim) { return 2 * dim % 256 == 0 ? 256 : 2 * dim & -(2 * dim); }

inline constexpr int kPrefillGroups = 2;  // warpgroups that attend
inline constexpr int kQueryWarps = 3;

// Whether tiles are whole; some may be pieces; or these are fixed and thread blocks fold several (PrefillLaunch::fold).
// Each is a kernel of its own, which is compiled as if there were no others.
enum class PrefillForm { kWhole, kPieces, kFolds };

// Keys and values of a type, for heads of D dimensions. Those of 8 bits become f16 on their way, as queries do.
template <KvType kType, bool kWireIsBF16, int D, PrefillForm kForm>
struct PrefillShape {
  static constexpr bool kPieces = kForm != PrefillForm::kWhole;
  static constexpr bool kFolds = kForm == PrefillForm::kFolds;
  static constexpr bool kWide = kType != KvType::kE4M3;
  static constexpr bool kBF16 = kType == KvType::kBF16;  // products
  static constexpr bool kWireBF16 = kWireIsBF16;         // q and o
  using Math = std::conditional_t<kBF16, BF16Math, F16Math>;
  using WireMath = std::conditional_t<kWireBF16, BF16Math, F16Math>;
  static constexpr int kDim = D;
  static constexpr int kRowBytes = D * (kWide ? 2 : 1);                    // in a block
  static constexpr int kSlab = D % 64 == 0 ? 128 : D % 32 == 0 ? 64 : 32;  // bytes of a row that lie together
  static constexpr int kSlabs = 2 * D / kSlab;
  static constexpr int kBlocks = PrefillStepBlocks(D);  // of a step
  static constexpr int kKeys = kBlocks * CudaKvLayout::kTokens;
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = D > 128 ? 1 : 2;
  static constexpr int kQueryBytes = kPrefillRows * D * 2;
  static constexpr int kStepBytes = kKeys * D * 2;                 // of keys, and of values
  static constexpr int kRawBytes = kWide ? 0 : kKeys * kRowBytes;  // the same of 8 bits
  static constexpr int kCopies = kBlocks * kSlabs;
  // Two warpgroups attend, one copies, and one widens, unless products take more registers than four leave to each.
  static constexpr int kGroups = kWide || D > 128 ? 3 : 4;
  static constexpr int kThreads = kGroups * 128;
  static constexpr int kAttendingRegisters = kGroups == 3 ? 224 : 200;
  static constexpr int kWideningWarps = kWide ? 0 : kGroups == 4 ? 4 : kQueryWarps;
};

inline constexpr int kRawStages = 2;
inline constexpr int kSlots = 4;  // of tiles that the warps know of: results are written after queries were given up

struct PrefillSlot {
  DeviceAttentionItem item;
  PrefillTile tile;  // segments < 0: there is no further one
};

struct PrefillArgs {
  PrefillLaunch call;
  CUtensorMap map;  // of the arena: [units][slabs of a row][64 rows][slab]
};

template <typename S>
struct PrefillShared {
  static constexpr int kBarriers =
      Pipeline<S::kQueryStages>::kBytes + 2 * Pipeline<S::kStages>::kBytes + Pipeline<kRawStages>::kBytes;
  static constexpr int kSlotsAt = (kBarriers + 15) / 16 * 16;
  static constexpr int kBytes = 1024 + S::kQueryStages * S::kQueryBytes + 2 * S::kStages * S::kStepBytes +
                                kRawStages * S::kRawBytes + kSlotsAt + kSlots * static_cast<int>(sizeof(PrefillSlot));

  uint32_t queries, keys, values, raw;  // addresses
  Pipeline<S::kQueryStages> query_ring;
  Pipeline<S::kStages> key_ring, value_ring;
  Pipeline<kRawStages> raw_ring;  // of 8 bits: keys and values in turns, as they are needed
  PrefillSlot* slots;

  // The copies want multiples of 1024.
  __device__ __forceinline__ explicit PrefillShared(unsigned char* memory)
      : queries((SharedAddress(memory) + 1023) / 1024 * 1024),
        keys(queries + S::kQueryStages * S::kQueryBytes),
        values(keys + S::kStages * S::kStepBytes),
        raw(values + S::kStages * S::kStepBytes),
        query_ring(Barriers()),
        key_ring(Barriers() + Pipeline<S::kQueryStages>::kBytes),
        value_ring(Barriers() + Pipeline<S::kQueryStages>::kBytes + Pipeline<S::kStages>::kBytes),
        raw_ring(Barriers() + Pipeline<S::kQueryStages>::kBytes + 2 * Pipeline<S::kStages>::kBytes),
        slots(reinterpret_cast<PrefillSlot*>(memory + (Barriers() + kSlotsAt - SharedAddress(memory)))) {}

 private:
  __device__ __forceinline__ uint32_t Barriers() const { return raw + kRawStages * S::kRawBytes; }
};

// Byte `byte` of row `row` in a matrix of columns of kSlab bytes with so many rows.
template <int kSlab>
__device__ __forceinline__ constexpr int SlabOffset(int rows, int row, int byte) {
  constexpr int kChunks = kSlab / 16;
  const int chunk = byte / 16 % kChunks, swizzle = CudaKvLayout::row_swizzle(row, kSlab);
  return (byte / kSlab * rows + row) * kSlab + (chunk ^ swizzle) * 16;
}

// The steps of a tile are numbered from its first keys on and done from the last to the first.
template <typename S>
struct TileSteps {
  int steps, absent, last_tokens, first;

  __device__ __forceinline__ explicit TileSteps(const PrefillTile& tile)
      : steps((tile.absent + tile.segments + S::kBlocks - 1) / S::kBlocks),
        absent(steps * S::kBlocks - tile.absent - tile.segments),  // blocks of the last step that are not there
        last_tokens(tile.last_tokens),
        first(absent + tile.segments - 1) {}  // the number of the first block that is there

  // A block's number, counted from the last one, absent ones included.
  __device__ __forceinline__ int FromLast(int step, int block) const { return (steps - step) * S::kBlocks - 1 - block; }
  // Tokens of a block that are there.
  __device__ __forceinline__ int Tokens(int step, int block) const {
    const int from_last = FromLast(step, block);
    if (from_last < absent || from_last > first) return 0;
    return from_last == absent ? last_tokens : CudaKvLayout::kTokens;
  }
  // each(step, values) in the order in which keys and values are needed: keys, keys, values, keys, values, ..., values.
  template <typename Each>
  __device__ __forceinline__ void ForEach(Each&& each) const {
    for (int step = steps - 1; step >= -1; --step) {
      if (step >= 0) each(step, false);
      if (step + 1 < steps) each(step + 1, true);
    }
  }
};

}  // namespace dovetail::kernels::cuda
