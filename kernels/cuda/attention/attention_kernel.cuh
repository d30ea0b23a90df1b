#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/attention/attention_output.cuh"
#include "kernels/cuda/attention/attention_tile.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/primitives.cuh"

// Attention over paged KV (paged_attention.h says what is computed). One persistent thread block a multiprocessor
// takes a contiguous range (part) of all KV blocks, nearly equal, whatever sequences and heads they belong to. One warp
// copies whole KvBlocks into a ring of shared memory; eight warps attend, each to blocks of its own, with its own (o,
// m, l); where a part's blocks of one (sequence, head) end, they hand these on from warp to warp and the last writes
// the result, or a piece of it if other parts hold the rest: the last to arrive joins the pieces in the order of the
// tokens. So bits do not depend on timing.
//
// The rows of a tile are the query heads of a KV head, times q_rows. Products run on the tensor cores (16 rows x 64
// tokens), sums and softmax in f32; weights are rounded to the type of the products, their sum is that of the rounded
// ones.

namespace dovetail::kernels::cuda {

// Two warp groups attend; of the third, one warp copies, and the rest give their registers to the others.
inline constexpr int kThreads = (kConsumerWarps + 4) * 32;

inline constexpr int kMaxStages = 24;
inline constexpr int kWorthSkipping = 2048;  // bytes of a block, for one more copy

// Of large blocks few fit: the keys of the next one are brought while the values of one are still read.
template <int D>
inline constexpr int kHalves = D > 128 ? 2 : 1;

struct SharedPlan {
  uint32_t ring;       // [stages][block bytes]
  uint32_t full;       // [stages][halves] barriers: keys and values, or both
  uint32_t empty;      // [stages][halves]
  uint32_t chain;      // [warps], and of the tiles' buffers: that they have been read
  float* handover_o;   // [tiles][16][stride]
  float* handover_ml;  // [tiles][16][2]
};

template <int D>
__host__ __device__ constexpr int HandoverStride() {
  return D + 8;  // rows fall on different banks
}

template <int D>
__host__ __device__ constexpr int FixedSharedBytes(int tiles) {
  const int buffers = tiles == kConsumerWarps ? 0 : tiles;
  return buffers * kTileRows * (HandoverStride<D>() + 2) * 4 + (2 * kMaxStages + 2 * kConsumerWarps) * 8 + 128;
}

// Walks the spans of a part; blocks only ascend.
struct Cursor {
  const AttentionSpan* at;
  AttentionSpan span;

  __device__ __forceinline__ Cursor(const AttentionLaunch& p, int first) : at(p.spans + first), span(*at) {}
  __device__ __forceinline__ void MoveTo(int block) {
    while (span.block_end <= block) span = *++at;
  }
};

// A block to be brought.
struct Source {
  const std::byte* at = nullptr;  // null: a pretended one
  int tokens = 0;                 // that any row sees, from its first on
  bool fresh = false;             // the kernel before may have appended to it
};

__device__ __forceinline__ Source SourceOf(const AttentionLaunch& p, Cursor& cursor, int block) {
  Source source;
  cursor.MoveTo(block);
  const AttentionSpan& span = cursor.span;
  if (span.sees_nothing) return source;
  const DeviceAttentionItem& item = p.items[span.item];
  const int at = block - span.block_begin, head = at / span.segments;
  const int segment = span.first_segment + at % span.segments;
  source.at = item.blocks[head * item.head_step + (segment - item.first_segment)] + p.kv_offset;
  source.tokens = max(1, min(CudaKvLayout::kTokens, item.token_end - segment * CudaKvLayout::kTokens));
  source.fresh = (segment + 1) * CudaKvLayout::kTokens > item.first_position;
  return source;
}

#if __CUDA_ARCH__ >= 900
// One lane: brings a block to a stage when that is empty.
template <int kHalves>
__device__ __forceinline__ void BringBlock(const AttentionLaunch& p, const Source& block, uint32_t to, uint32_t full,
                                           uint32_t empty, uint32_t parity) {
  const int bytes = p.layout.bytes();
  BarrierWait(empty, parity);
  if (block.fresh) WaitForPredecessor();
  if (block.at != nullptr) {
    // What lies beyond the last token is masked, whatever the memory holds.
    const int keys = block.tokens * p.layout.key_row_bytes(), values = p.layout.value_bytes_of(block.tokens);
    const int values_at = p.layout.key_bytes();
    if (kHalves == 2) {
      BarrierArriveExpect(full, keys);
      BulkCopy(to, block.at, keys, full);
      BarrierWait(empty + 8, parity);
      BarrierArriveExpect(full + 8, values);
      BulkCopy(to + values_at, block.at + values_at, values, full + 8);
    } else if (bytes - keys - values < kWorthSkipping) {
      BarrierArriveExpect(full, bytes);
      BulkCopy(to, block.at, bytes, full);
    } else {
      BarrierArriveExpect(full, keys + values);
      BulkCopy(to, block.at, keys, full);
      BulkCopy(to + values_at, block.at + values_at, values, full);
    }
  } else {
    BarrierArrive(full);
    if (kHalves == 2) {
      BarrierWait(empty + 8, parity);
      BarrierArrive(full + 8);
    }
  }
}
#else
// One warp: copies a block to a stage when that is empty.
template <int kHalves>
__device__ __forceinline__ void CopyBlock(const AttentionLaunch& p, const std::byte* from, uint32_t to, uint32_t full,
                                          uint32_t empty, uint32_t parity, int lane) {
  const int bytes = p.layout.bytes();
  for (int half = 0; half < kHalves; ++half) {
    BarrierWait(empty + half * 8, parity);
    __syncwarp();
    const int begin = half == 0 ? 0 : p.layout.key_bytes(), end = half + 1 < kHalves ? p.layout.key_bytes() : bytes;
    if (from != nullptr) {
      for (int at = begin + lane * 16; at < end; at += 512) ChunkCopy(to + at, from + at);
    }
    BarrierArriveAfterCopies(full + half * 8);
  }
}
#endif

// One warp: brings block after block.
template <int kHalves>
__device__ __forceinline__ void Produce(const AttentionLaunch& p, const SharedPlan& shared, const AttentionPart& part,
                                        int lane) {
  const int bytes = p.layout.bytes();
  Cursor cursor(p, part.span);
  int stage = 0;
  uint32_t parity = 1;
  Source next;
  if (part.begin + lane < part.end) next = SourceOf(p, cursor, part.begin + lane);
  for (int base = part.begin; base < part.end; base += 32) {
    const Source mine = next;
    if (base + 32 + lane < part.end) next = SourceOf(p, cursor, base + 32 + lane);
    const int count = min(32, part.end - base);
    for (int i = 0; i < count; ++i) {
      const uint32_t full = shared.full + stage * kHalves * 8, to = shared.ring + stage * bytes;
      const uint32_t empty = shared.empty + stage * kHalves * 8;
#if __CUDA_ARCH__ >= 900
      if (lane == i) BringBlock<kHalves>(p, mine, to, full, empty, parity);
      __syncwarp();
#else
      const auto from =
          reinterpret_cast<const std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.at), i));
      CopyBlock<kHalves>(p, from, to, full, empty, parity, lane);
#endif
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// The rows of one unit (span and KV head) that a warp works on.
struct TileRows {
  int head = 0;
  int row0 = 0;  // among q_rows * group
  int rows = 0;  // 0: none
};

__device__ __forceinline__ TileRows RowsOf(const AttentionLaunch& p, const AttentionSpan& span,
                                           const DeviceAttentionItem& item, int head, int tile_number) {
  TileRows tile;
  tile.head = head;
  tile.row0 = (span.tile_group * p.tiles + tile_number) * kTileRows;
  tile.rows = max(0, min(kTileRows, item.q_rows * p.group - tile.row0));
  return tile;
}

template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void WriteResult(const AttentionLaunch& p, const DeviceAttentionItem& item,
                                            const TileRows& tile, const TileState<kType, D, kFull>& state, int lane) {
  const int g = lane / 4, c = lane % 4, dims = p.layout.value_dim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (g + 8 * half >= tile.rows) continue;
    const RowResult row = ResultOf(p, item, tile.head, tile.row0 + g + 8 * half, state.m[half], state.l[2 * half]);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if (8 * j >= dims) continue;
      row.StorePair(p, 8 * j + 2 * c, state.o[j][2 * half], state.o[j][2 * half + 1]);
    }
    row.StoreRest(p, item, c);
  }
}

// A piece of a unit whose other blocks belong to other thread blocks: stores it; the last to come joins all and
// writes the result.
template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void WritePiece(const AttentionLaunch& p, const AttentionPart& part,
                                           const AttentionSpan& span, const DeviceAttentionItem& item,
                                           const TileRows& tile, int tile_number, TileState<kType, D, kFull>& state,
                                           int lane) {
  const int dims = p.layout.value_dim;
  const int64_t unit_begin = span.block_begin + static_cast<int64_t>(tile.head) * span.segments;
  const int me = static_cast<int>(blockIdx.x);
  const int first = unit_begin >= part.begin ? me : part.first_part;
  const int last = unit_begin + span.segments <= part.end ? me : part.last_part;
  const auto slot = [&](int who) {
    return (static_cast<int64_t>(who) * 2 + (who == first ? 1 : 0)) * p.tiles + tile_number;
  };
  const int64_t mine = slot(blockIdx.x);
  state.Store(p.piece_o + mine * kTileRows * dims, p.piece_ml + mine * kTileRows * 2, dims, tile.rows, dims, lane);
  __threadfence();
  __syncwarp();
  int32_t* arrived = p.arrived + first * p.tiles + tile_number;
  int before = 0;
  if (lane == 0) before = atomicAdd(arrived, 1);
  before = __shfl_sync(~0u, before, 0);
  if (before != last - first) return;
  __threadfence();
  if (lane == 0) *arrived = 0;
  const PieceRows pieces{
      p.piece_o + slot(first) * kTileRows * dims,
      p.piece_ml + slot(first) * kTileRows * 2,
      p.piece_o + tile_number * kTileRows * dims + static_cast<int64_t>(first + 1) * 2 * p.tiles * kTileRows * dims,
      p.piece_ml + tile_number * kTileRows * 2 + static_cast<int64_t>(first + 1) * 2 * p.tiles * kTileRows * 2,
      2 * static_cast<int64_t>(p.tiles) * kTileRows,
      dims,
      last - first + 1};
  for (int row = 0; row < tile.rows; row += PieceRows::kRows) {
    pieces.Join<(D + 127) / 128>(p, item, tile.head, tile.row0, row, min(PieceRows::kRows, tile.rows - row), lane);
  }
}

// Brings queries near that are needed in some microseconds.
__device__ __forceinline__ void TouchQueries(const AttentionLaunch& p, const DeviceAttentionItem& item, int head,
                                             int row0, int rows, int lane) {
  const int64_t element = p.q_type == WireType::kF32 ? 4 : 2, bytes = p.layout.key_dim * element;
  const int lines = static_cast<int>((bytes + 127) / 128);
  for (int i = lane; i < rows * lines; i += 32) {
    const int row = row0 + i / lines;
    const int64_t at = item.q_offset + (row / p.group) * item.q_row_step +
                       static_cast<int64_t>(head * p.group + row % p.group) * p.layout.key_dim;
    [[maybe_unused]] uint32_t unused;
    asm volatile("ld.global.u32 %0, [%1];"
                 : "=r"(unused)
                 : "l"(static_cast<const std::byte*>(p.q) + at * element + i % lines * 128));
    static_cast<void>(unused);
  }
}

// The warps of a team attend to the same rows and hand their sums on from one to the next through shared memory.
struct Handover {
  uint32_t my_turn, next_turn, buffer_read;  // barriers
  float* o;
  float* ml;
};

template <int D>
__device__ __forceinline__ Handover HandoverOf(const AttentionLaunch& p, const SharedPlan& shared, int warp) {
  const int tile_number = warp % p.tiles, member = warp / p.tiles;
  return {shared.chain + warp * 8, shared.chain + ((member + 1) % p.team * p.tiles + tile_number) * 8,
          shared.chain + (kConsumerWarps + tile_number) * 8,
          shared.handover_o + tile_number * kTileRows * HandoverStride<D>(),
          shared.handover_ml + tile_number * kTileRows * 2};
}

// Joins the sums of the warps before; `place`: this one's in the order. Returns whether it is the last, whose state is
// then that of all; else the sums have been handed on.
template <KvType kType, int D, bool kFull>
__device__ __forceinline__ bool HandOver(const Handover& to, int place, bool last, int rows, uint32_t& turn_parity,
                                         uint32_t& read_parity, TileState<kType, D, kFull>& state, int lane) {
  if (place > 0) {
    BarrierWait(to.my_turn, turn_parity);
    turn_parity ^= 1;
  } else {
    BarrierWait(to.buffer_read, read_parity);
  }
  read_parity ^= 1;
  __syncwarp();
  if (place > 0 && rows > 0) state.JoinStored(to.o, to.ml, HandoverStride<D>(), rows, D, lane);
  __syncwarp();  // four lanes read what one of them writes
  if (!last && rows > 0) state.Store(to.o, to.ml, HandoverStride<D>(), rows, D, lane);
  __syncwarp();
  if (lane == 0) BarrierArrive(last ? to.buffer_read : to.next_turn);
  return last;
}

// One warp: calls attend(between) when the keys of the block in a stage are there, and lets the block go behind it.
// `between` waits for the values.
template <int D, typename Attend>
__device__ __forceinline__ void WithBlock(const SharedPlan& shared, int stage, uint32_t parity, int lane,
                                          const Attend& attend) {
  const uint32_t full = shared.full + stage * kHalves<D> * 8, empty = shared.empty + stage * kHalves<D> * 8;
  const auto between = [&] {
    if constexpr (kHalves<D> == 2) {
      __syncwarp();
      if (lane == 0) BarrierArrive(empty);
      BarrierWait(full + 8, parity);
      __syncwarp();
    }
  };
  BarrierWait(full, parity);
  __syncwarp();
  attend(between);
  __syncwarp();
  if (lane == 0) BarrierArrive(empty + (kHalves<D> - 1) * 8);
}

// One of the attending warps.
template <KvType kType, int D, bool kFull>
__device__ __forceinline__ void Consume(const AttentionLaunch& p, const SharedPlan& shared, const AttentionPart& part,
                                        int warp, int lane) {
  const int tile_number = warp % p.tiles, team = p.team, member = warp / p.tiles;
  if (member >= team) return;
  const Handover handover = HandoverOf<D>(p, shared, warp);
  const int bytes = p.layout.bytes();
  Cursor cursor(p, part.span);
  TileState<kType, D, kFull> state;
  WaitForPredecessor();  // for q
  LetSuccessorBegin();
  uint32_t parity = 0, turn_parity = 0, read_parity = 1;
  int stage = member;  // stages are a multiple of the team

  int skip = member;  // blocks until the next one of this warp
  for (int block = part.begin; block < part.end;) {
    cursor.MoveTo(block);
    const AttentionSpan& span = cursor.span;
    const DeviceAttentionItem& item = p.items[span.item];
    const int at = block - span.block_begin, first = at % span.segments;
    const int count = min(span.segments - first, part.end - block);
    const TileRows tile = RowsOf(p, span, item, at / span.segments, tile_number);
    const bool works = tile.rows > 0 && !span.sees_nothing;

    state.Clear();
    const bool takes_part = skip < count;
    if (works && takes_part) state.Load(p, item, tile.head, tile.row0, tile.rows, lane);
    // Warps hand over in the order in which their last blocks come, so that none waits with its next block in hand.
    const int place = (skip + 2 * team - 1 - (count - 1) % team) % team;
    int in_piece = skip;
    for (; in_piece < count; in_piece += team) {
      if (in_piece + team >= count && block + count < min(part.end, span.block_end)) {
        TouchQueries(p, item, tile.head + 1, tile.row0, tile.rows, lane);
      }
      WithBlock<D>(shared, stage, parity, lane, [&](const auto& between) {
        if (!works) return between();
        state.Attend(p, shared.ring + stage * bytes, (span.first_segment + first + in_piece) * CudaKvLayout::kTokens,
                     lane, between);
      });
      stage += team;
      if (stage >= p.stages) {
        stage = member;
        parity ^= 1;
      }
    }
    skip = in_piece - count;

    bool writes = takes_part;
    if (count > 1 && team > 1)
      writes = HandOver(handover, place, place == team - 1, tile.rows, turn_parity, read_parity, state, lane);
    if (writes && tile.rows > 0) {
      if (count == span.segments) {
        WriteResult(p, item, tile, state, lane);
      } else {
        WritePiece(p, part, span, item, tile, tile_number, state, lane);
      }
    }
    block += count;
  }
}

template <KvType kType, int D, bool kFull>
__global__ void __launch_bounds__(kThreads, 1) AttentionKernel(const __grid_constant__ AttentionLaunch p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int buffers = p.tiles == kConsumerWarps ? 0 : p.tiles;
  const AttentionExtent extent = *p.extent;
  const AttentionPart part = p.parts[blockIdx.x];
  if (blockIdx.x >= extent.parts) return WaitForPredecessor();
  SharedPlan shared;
  shared.ring = SharedAddress(memory);
  unsigned char* rest = memory + p.stages * p.layout.bytes();
  shared.handover_o = reinterpret_cast<float*>(rest);
  shared.handover_ml = shared.handover_o + buffers * kTileRows * HandoverStride<D>();
  shared.full = SharedAddress(shared.handover_ml + buffers * kTileRows * 2);
  shared.empty = shared.full + 8 * kMaxStages;
  shared.chain = shared.empty + 8 * kMaxStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages * kHalves<D>; ++i) {
#if __CUDA_ARCH__ >= 900
      BarrierInit(shared.full + 8 * i, 1);
#else
      BarrierInit(shared.full + 8 * i, 32);
#endif
      BarrierInit(shared.empty + 8 * i, p.tiles);
    }
    for (int i = 0; i < 2 * kConsumerWarps; ++i) BarrierInit(shared.chain + 8 * i, 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __syncthreads();
  if (warp >= kConsumerWarps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (warp == kConsumerWarps) Produce<kHalves<D>>(p, shared, part, lane);
  } else {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    Consume<kType, D, kFull>(p, shared, part, warp, lane);
  }
}

template <KvType kType, int D, bool kFull>
int LaunchSized(AttentionLaunch launch, const DeviceLimits& limits, cudaStream_t stream) {
  const int fixed = FixedSharedBytes<D>(launch.tiles);
  int stages = (limits.shared_bytes - fixed) / launch.layout.bytes();
  if (stages > kMaxStages / kHalves<D>) stages = kMaxStages / kHalves<D>;
  // A stage must always fall to the same warps, or one that is ahead would take the last phase of a barrier for the
  // next.
  for (int team = 1; team <= kConsumerWarps / launch.tiles && team <= stages; ++team) {
    if (stages / team * team * 4 >= stages * 3) launch.stages = stages / team * team, launch.team = team;
  }
  if (launch.stages < 2) return static_cast<int>(cudaErrorInvalidConfiguration);
  const int bytes = fixed + launch.stages * launch.layout.bytes();
  const auto kernel = AttentionKernel<kType, D, kFull>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  return LaunchDependent(kernel, dim3(launch.grid), kThreads, bytes, stream, launch);
}

template <KvType kType>
int LaunchTyped(const AttentionLaunch& launch, const DeviceLimits& limits, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const int dim = launch.layout.key_dim > launch.layout.value_dim ? launch.layout.key_dim : launch.layout.value_dim;
  const bool full = launch.layout.key_dim == launch.layout.value_dim;
  if (dim <= 64)
    return full && dim == 64 ? LaunchSized<kType, 64, true>(launch, limits, s)
                             : LaunchSized<kType, 64, false>(launch, limits, s);
  if (dim <= 128) {
    return full && dim == 128 ? LaunchSized<kType, 128, true>(launch, limits, s)
                              : LaunchSized<kType, 128, false>(launch, limits, s);
  }
  return full && dim == 256 ? LaunchSized<kType, 256, true>(launch, limits, s)
                            : LaunchSized<kType, 256, false>(launch, limits, s);
}

}  // namespace dovetail::kernels::cuda
