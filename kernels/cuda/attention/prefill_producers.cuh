#pragma once
#include "kernels/cuda/attention/attention_tile.cuh"
#include "kernels/cuda/attention/prefill_shape.cuh"
#include "kernels/cuda/primitives/chunks.cuh"
#include "kernels/cuda/primitives/warpgroup_products.cuh"

// The warps of the attention kernel for many rows (prefill_kernel.cuh) that bring keys, values and queries. Device code
// only, of sm_90a.

namespace dovetail::kernels::cuda {

#if __CUDA_ARCH_FEAT_SM90_ALL

// A box of the map, [1][1][64 rows][slab]. What lies beyond the 64 rows is zero.
__device__ __forceinline__ void CopyColumn(uint32_t to, const CUtensorMap& map, int row, int column, int unit,
                                           uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(column), "r"(unit), "r"(bar)
      : "memory");
}

// One warp goes through its tiles: each(at, tokens, values) for each block of a step that a lane is to bring, `at`
// being where it begins in device memory.
template <typename S, typename Each>
__device__ __forceinline__ void ForEachBlock(const PrefillLaunch& p, int my_block, int lane, Each&& each) {
  const int end = p.first_tile[blockIdx.x + 1];
  for (int number = p.first_tile[blockIdx.x]; number < end; ++number) {
    const PrefillTile tile = p.tiles[number];
    const TileSteps<S> walk(tile);
    // Lanes know a block each of the 32 at hand and of the 32 behind them.
    const auto block_at = [&](int from_last) -> const std::byte* {
      if (from_last >= walk.steps * S::kBlocks) return nullptr;
      return tile.last_block[-max(min(from_last, walk.first) - walk.absent, 0)];
    };
    const std::byte *known = block_at(lane), *further = block_at(32 + lane), *block = nullptr, *before = nullptr;
    walk.ForEach([&](int step, bool values) {
      if (!values) {
        const int first = walk.FromLast(step, S::kBlocks - 1);
        if (first > 0 && first % 32 == 0) {
          known = further;
          further = block_at(first + 32 + lane);
        }
        before = block;
        const int mine = walk.FromLast(step, min(my_block, S::kBlocks - 1)) % 32;
        block = reinterpret_cast<const std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(known), mine));
      }
      each((values && step > 0 ? before : block) + p.kv_offset, walk.Tokens(step, min(my_block, S::kBlocks - 1)),
           values);
    });
  }
}

// One warp: brings keys and values of 16 bits.
template <typename S>
__device__ __forceinline__ void ProduceBlocks(const PrefillArgs& args, const PrefillShared<S>& shared, int lane) {
  const PrefillLaunch& p = args.call;
  constexpr int kUnit = PrefillUnit(S::kDim);
  const int my_block = lane / S::kSlabs, my_column = lane % S::kSlabs;
  const int my_place = (my_column * S::kKeys + my_block * CudaKvLayout::kTokens) * S::kSlab;
  typename Pipeline<S::kStages>::State key_state, value_state;
  ForEachBlock<S>(p, my_block, lane, [&](const std::byte* block, int tokens, bool values) {
    auto& state = values ? value_state : key_state;
    const auto& ring = values ? shared.value_ring : shared.key_ring;
    ring.ProducerAcquire(state);
    if (lane == 0) ring.ProducerCommit(state, S::kStepBytes);
    __syncwarp();
    if (lane < S::kCopies) {
      // Rows [beyond, 64) of what begins so many rows before the block.
      const int beyond = CudaKvLayout::kTokens - tokens;
      const int64_t at = block + ((values ? CudaKvLayout::kTokens : 0) - beyond) * S::kRowBytes - p.arena;
      CopyColumn((values ? shared.values : shared.keys) + state.stage * S::kStepBytes + my_place, args.map, beyond,
                 my_column, static_cast<int>(at / kUnit), ring.Full(state));
    }
    state.Next();
  });
}

// One warp: brings keys and values of 8 bits as they are.
template <typename S>
__device__ __forceinline__ void ProduceRaw(const PrefillLaunch& p, const PrefillShared<S>& shared, int lane) {
  typename Pipeline<kRawStages>::State state;
  ForEachBlock<S>(p, lane, lane, [&](const std::byte* block, int tokens, bool values) {
    const int bytes = lane >= S::kBlocks ? 0 : values ? p.layout.value_bytes_of(tokens) : tokens * S::kRowBytes;
    int all = bytes;
#pragma unroll
    for (int other = 1; other < S::kBlocks; ++other) all += __shfl_sync(~0u, bytes, other);
    shared.raw_ring.ProducerAcquire(state);
    if (lane == 0) shared.raw_ring.ProducerCommit(state, all);
    __syncwarp();
    if (bytes > 0) {
      BulkCopy(shared.raw + state.stage * S::kRawBytes + lane * CudaKvLayout::kTokens * S::kRowBytes,
               block + (values ? p.layout.key_bytes() : 0), bytes, shared.raw_ring.Full(state));
    }
    state.Next();
  });
}

// Some warps widen keys and values of 8 bits: keys as rows of dimensions, values as rows of tokens, since that is how
// blocks hold them. Values behind the last token become zeros.
template <typename S>
class Widener {
 public:
  __device__ __forceinline__ Widener(const PrefillShared<S>& shared, int thread) : shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void Tile(const PrefillTile& tile) {
    const TileSteps<S> walk(tile);
    walk.ForEach([&](int step, bool values) {
      auto& state = values ? value_state_ : key_state_;
      const auto& ring = values ? shared_.value_ring : shared_.key_ring;
      shared_.raw_ring.ConsumerWait(raw_state_);
      ring.ProducerAcquire(state);
      const uint32_t from = shared_.raw + raw_state_.stage * S::kRawBytes;
      const uint32_t to = (values ? shared_.values : shared_.keys) + state.stage * S::kStepBytes;
      if (values) {
        Values(from, to, walk, step);
      } else {
        Keys(from, to);
      }
      FenceProducts();
      shared_.raw_ring.ConsumerRelease(raw_state_);
      ring.ProducerCommit(state);
      raw_state_.Next();
      state.Next();
    });
  }

 private:
  static constexpr int kWarps = S::kWideningWarps, kBatch = 4;

  // Eight rows by four chunks a warp: neither what eight lanes read nor what they write shares a bank. What varies
  // within the loops is known to the compiler.
  __device__ __forceinline__ void Keys(uint32_t from, uint32_t to) const {
    constexpr int kQuads = (S::kDim / 16 + 3) / 4, kStep = 8 * kWarps, kRounds = (S::kKeys + kStep - 1) / kStep;
    const int row0 = thread_ / 32 * 8 + thread_ % 32 / 4, lane = thread_ % 4;
    const int swizzle = S::kRowBytes % 128 == 0 ? (row0 & 1) << 2 : 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int chunk = 4 * quad + lane;
      const bool there = chunk < S::kDim / 16;
#pragma unroll
      for (int first = 0; first < kRounds; first += kBatch) {
        uint4 raw[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int row = row0 + (first + b) * kStep;
          if (there && row < S::kKeys) raw[b] = LoadShared16(from + row * S::kRowBytes + (chunk ^ swizzle) * 16);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int row = row0 + (first + b) * kStep;
          if (there && row < S::kKeys) Store(raw[b], to + SlabOffset<S::kSlab>(S::kKeys, row, 32 * chunk));
        }
      }
    }
  }

  __device__ __forceinline__ void Values(uint32_t from, uint32_t to, const TileSteps<S>& walk, int step) const {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      const int tokens = walk.Tokens(step, block);
      for (int dim = thread_; dim < S::kDim; dim += kWarps * 32) {
        uint4 raw[4];
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
          const int row = (4 * block + chunk) * S::kDim + (dim ^ CudaKvLayout::chunk_swizzle(chunk));
          raw[chunk] = LoadShared16(from + row * 16);
        }
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
          const int there = tokens - 16 * chunk;  // tokens of the chunk, or more
          uint4& r = raw[chunk];
          if (there < 16)
            r.x &= Below(there), r.y &= Below(there - 4), r.z &= Below(there - 8), r.w &= Below(there - 12);
          Store(r, to + block * S::kDim * 128 + SlabOffset<128>(S::kDim, dim, 32 * chunk));
        }
      }
    }
  }

  // 16 numbers of 8 bits as f16, in two neighbouring chunks.
  __device__ __forceinline__ static void Store(const uint4& raw, uint32_t to) {
    StoreShared16(to, make_uint4(WidenE4M3(raw.x), WidenE4M3High(raw.x), WidenE4M3(raw.y), WidenE4M3High(raw.y)));
    StoreShared16(to ^ 16, make_uint4(WidenE4M3(raw.z), WidenE4M3High(raw.z), WidenE4M3(raw.w), WidenE4M3High(raw.w)));
  }

  // The first so many bytes of a word.
  __device__ __forceinline__ static uint32_t Below(int bytes) {
    return bytes >= 4 ? ~0u : bytes <= 0 ? 0u : (1u << 8 * bytes) - 1;
  }

  const PrefillShared<S>& shared_;
  const int thread_;
  typename Pipeline<kRawStages>::State raw_state_;
  typename Pipeline<S::kStages>::State key_state_, value_state_;
};

// Three warps bring queries, and what is known of their tiles.
template <typename S>
class QueryProducer {
 public:
  __device__ __forceinline__ QueryProducer(const PrefillLaunch& p, const PrefillShared<S>& shared, int thread)
      : p_(p), shared_(shared), thread_(thread) {}

  __device__ __forceinline__ void Tile(const PrefillTile& tile) {
    constexpr int kThreads = kQueryWarps * 32, kChunks = S::kDim / 8;
    const DeviceAttentionItem& item = p_.items[tile.item];
    PrefillSlot& slot = Acquire();
    if (thread_ == 0) slot.tile = tile;
    if (thread_ == 1) slot.item = item;
    const int rows = min(kPrefillRows, item.q_rows * p_.group - tile.row0);
    const uint32_t to = shared_.queries + state_.stage * S::kQueryBytes;
    const int64_t from = item.q_offset + static_cast<int64_t>(tile.head * p_.group) * S::kDim, step = item.q_row_step;
    for (int i = thread_; i < kPrefillRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, at = tile.row0 + row;
      const bool there = row < rows;
      const int64_t element = there ? from + (at / p_.group) * step + (at % p_.group) * S::kDim + chunk * 8 : 0;
      const uint32_t place = to + SlabOffset<S::kSlab>(kPrefillRows, row, chunk * 16);
      if constexpr (S::kBF16 == S::kWireBF16) {
        ChunkCopyOrZero(place, static_cast<const uint16_t*>(p_.q) + element, there);
      } else {
        StoreShared16(place, LoadQuery<typename S::Math>(p_, element, 0, there));
      }
    }
    WaitForChunkCopies();
    FenceProducts();
    Commit();
  }

  // There is no further tile.
  __device__ __forceinline__ void End() {
    PrefillSlot& slot = Acquire();
    if (thread_ == 0) slot.tile.segments = -1;
    Commit();
  }

 private:
  __device__ __forceinline__ PrefillSlot& Acquire() {
    shared_.query_ring.ProducerAcquire(state_);
    return shared_.slots[number_++ % kSlots];
  }
  __device__ __forceinline__ void Commit() {
    shared_.query_ring.ProducerCommit(state_);
    state_.Next();
  }

  const PrefillLaunch& p_;
  const PrefillShared<S>& shared_;
  const int thread_;
  int number_ = 0;
  typename Pipeline<S::kQueryStages>::State state_;
};

// Three warps. They also widen where no other warps do.
template <typename S>
__device__ __forceinline__ void ProduceQueries(const PrefillLaunch& p, const PrefillShared<S>& shared, int thread) {
  QueryProducer<S> queries(p, shared, thread);
  Widener<S> widener(shared, thread);
  const int end = p.first_tile[blockIdx.x + 1];
  for (int number = p.first_tile[blockIdx.x]; number < end; ++number) {
    const PrefillTile tile = p.tiles[number];
    queries.Tile(tile);
    if constexpr (S::kWideningWarps == kQueryWarps) widener.Tile(tile);
  }
  queries.End();
}

template <typename S>
__device__ __forceinline__ void WidenBlocks(const PrefillLaunch& p, const PrefillShared<S>& shared, int thread) {
  Widener<S> widener(shared, thread);
  const int end = p.first_tile[blockIdx.x + 1];
  for (int number = p.first_tile[blockIdx.x]; number < end; ++number) widener.Tile(p.tiles[number]);
}

#endif

}  // namespace dovetail::kernels::cuda
