#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/attention_args.h"

namespace dovetail::kernels::cuda {

// KvBlocks that the kernel attends at once, for heads of so many dimensions.
constexpr int PrefillStepBlocks(int dim) { return dim > 128 ? 1 : 2; }

// What the host hands to the attention kernel for many rows (prefill_kernel.cuh): plain structs.
// Threads: plain values.

// With --deterministic what a tile's rows see is attended in pieces of so many KvBlocks, counted from a sequence's
// first token, and these are folded together, the last one first (FoldPiece in prefill_fold.cuh).
inline constexpr int kFixedPieceBlocks = 32;
inline constexpr int kPrefillRows = 128;  // (token, head) rows of a tile, as many as one thread block attends at once

// Rows [row0, row0 + 128) of an item's q_rows * group for one KV head, and all blocks that any of them sees. Where few
// tiles have many blocks, some of these: then a piece of the result is stored, and the tile's pieces are joined.
struct PrefillTile {
  const std::byte* const* last_block =
      nullptr;  // where the table names the last of the blocks; those before lie before
  int32_t item = 0;
  int32_t head = 0;
  int32_t row0 = 0;
  int32_t first_segment = 0;
  int32_t segments = 0;     // 0: the rows see nothing
  int32_t absent = 0;       // blocks before the first that are counted as if they were there: steps begin on even ones
  int32_t last_tokens = 0;  // of the last block, 1..64
  int32_t piece = -1;       // where the launch's pieces have it; -1: the tile has all blocks and writes the result
};

// Pieces [first_piece, first_piece + pieces) of those rows, in the order of their blocks. No pieces: nothing is joined.
struct PrefillJoin {
  int32_t item = 0;
  int32_t head = 0;
  int32_t row0 = 0;
  int32_t first_piece = 0;
  int32_t pieces = 0;
};

struct PrefillLaunch : AttentionCall {
  const PrefillTile* tiles = nullptr;
  const int32_t* first_tile = nullptr;  // [grid + 1]: thread block b attends tiles [first_tile[b], first_tile[b + 1])
  // All blocks lie in this memory, behind its first kArenaLead bytes, on multiples of 256 bytes from its beginning.
  const std::byte* arena = nullptr;
  size_t arena_bytes = 0;
  const PrefillJoin* joins = nullptr;
  int32_t join_count = 0;
  float* piece_o = nullptr;   // [pieces][128][value_dim], not divided by l
  float* piece_ml = nullptr;  // [pieces][128][2]: the reference m times log2(e), and l
  // Fixed pieces: those that are stored have kFixedPieceBlocks, and a thread block that has several of a tile folds
  // them in this memory, of PrefillFoldBytes for each. Null: no fixed pieces.
  std::byte* fold = nullptr;
};

// Of PrefillLaunch::fold, for heads of so many dimensions: for each of 256 threads o of its rows, and their m and l.
constexpr size_t PrefillFoldBytes(int dim) { return size_t{256} * (dim / 2 + 4) * sizeof(float); }

// Whether the kernel attends such rows on this device: cuda_attention.h says which. It must be the current one.
// Threads: thread-safe.
bool PrefillTakes(const CudaKvLayout* layout, WireType q_type, size_t arena_bytes, const DeviceLimits* limits);

// Enqueues one pass, and the joining of its pieces. cudaError_t as int; 0: enqueued. Rows that PrefillTakes refuses
// must not be given. Threads: any host thread, one at a time per stream.
int LaunchPrefill(const PrefillLaunch* launch, void* stream);

// Enqueues the joining alone (prefill_join.cu), which any GPU can do; nothing if there are no pieces.
// Threads: any host thread, one at a time per stream.
int LaunchPrefillJoin(const PrefillLaunch& launch, void* stream);

}  // namespace dovetail::kernels::cuda
