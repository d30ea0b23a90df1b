#include "kernels/cuda/state_chunk_parts.cuh"
#include "kernels/cuda/state_launches.h"

// The second kernel of the chunked form: chunk after chunk, a thread block a head and 64 value columns. S lies in the
// accumulators, f32, and rounded to bf16 in shared memory, where products read it:
//   u = inverse (v - recall S)   (or v times its rate)     o = query S + weights u     S = total S + keys^T u

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256, kTokens = kStateTokens, kSlice = kStateChunkSlice, kStages = 2;
constexpr int kNarrow = 72;  // elements from row to row of 64: no bank twice

__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

template <int kKeys, bool kDelta>
class Chunks {
  static constexpr int kWide = kKeys + 8;               // elements from row to row of query, recall, keys
  static constexpr int kStateTiles = kKeys == 128 ? 8 : 4;  // of 8 columns, a warp's rows of S

 public:
  struct Stage {
    __nv_bfloat16 query[kTokens * kWide], keys[kTokens * kWide], recall[kDelta ? kTokens * kWide : 8];
    __nv_bfloat16 weights[kTokens * kNarrow], inverse[kDelta ? kTokens * kNarrow : 8];
    __nv_bfloat16 values[kTokens * kNarrow];
    float total[kKeys], rate[kTokens];
  };
  struct Shared {
    Stage stages[kStages];
    __nv_bfloat16 state[kKeys * kNarrow];
    __nv_bfloat16 rest[kDelta ? kTokens * kNarrow : 8];  // v - recall S
    __nv_bfloat16 u[kTokens * kNarrow];
  };

  __device__ Chunks(const StateLaunch& launch, Shared& shared, const StateUnit& of)
      : p(launch), s(shared), item(p.items[of.item]), head(of.head), first_column(blockIdx.y * kSlice) {
    end = min(p.chunk_end, ChunksOf(item));
  }

  __device__ void Run() {
    if (p.chunk_begin >= end) return;
    LoadState();
    Fetch(p.chunk_begin);
    kept = BlockAt(p.chunk_begin).kept();
    for (int chunk = p.chunk_begin; chunk < end; ++chunk) {
      bool next_kept = false;
      if (chunk + 1 < end) {
        Fetch(chunk + 1);
        next_kept = BlockAt(chunk + 1).kept();
      }
      CommitCopies();
      WaitForCopies<1>();
      __syncthreads();
      Advance(chunk, s.stages[chunk % kStages]);
      kept = next_kept;
      __syncthreads();
    }
    if (p.carry != nullptr && end == p.chunk_end) StoreCarry();
  }

 private:
  __device__ __forceinline__ StateBlock BlockAt(int chunk) const {
    return BlockOf(p, item, head, item.first_position / kTokens + chunk);
  }
  // The thread's elements of S: rows key_row and key_row + 8, columns of tile n.
  __device__ __forceinline__ int KeyRow() const { return (kKeys == 128 ? warp : warp % 4) * 16 + lane / 4; }
  __device__ __forceinline__ int StateColumn(int n) const {
    return (kKeys == 128 ? 0 : warp / 4 * 32) + 8 * n + lane % 4 * 2;
  }
  __device__ __forceinline__ float* Carry(int row, int column) const {
    const int width = StateChunkValues(p.value_dim);
    return p.carry + (static_cast<int64_t>(blockIdx.x) * kKeys + row) * width + first_column + column;
  }

  __device__ __forceinline__ void LoadState() {
    const bool carried = p.chunk_begin > 0;
    const bool fresh = !carried && item.first_position < kTokens;
    const StateBlock before = BlockAt(p.chunk_begin - (carried || fresh ? 0 : 1));
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = KeyRow() + 8 * half, column = StateColumn(n);
        float2 x = {0, 0};
        if (carried) {
          x = *reinterpret_cast<const float2*>(Carry(row, column));
        } else if (!fresh && row < p.key_dim && first_column + column < p.layout.value_stride) {
          const std::byte* at = before.Row(p.layout.state, row);
          if (p.state_bf16) {
            x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at + 2 * (first_column + column)));
          } else {
            x = *reinterpret_cast<const float2*>(at + 4 * (first_column + column));
          }
        }
        state[n][2 * half] = x.x;
        state[n][2 * half + 1] = x.y;
      }
    ShareState();
  }

  __device__ __forceinline__ void ShareState() {
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<__nv_bfloat162*>(&s.state[(KeyRow() + 8 * half) * kNarrow + StateColumn(n)]) =
            __floats2bfloat162_rn(state[n][2 * half], state[n][2 * half + 1]);
  }

  __device__ __forceinline__ void StoreCarry() {
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(Carry(KeyRow() + 8 * half, StateColumn(n))) =
            make_float2(state[n][2 * half], state[n][2 * half + 1]);
  }

  __device__ __forceinline__ void FetchRows(__nv_bfloat16* to, int to_step, const __nv_bfloat16* from, int from_step,
                                            int width) {
    const uint32_t base = SharedAddress(to);
    const int per_row = width / 8;
    for (int i = threadIdx.x; i < kTokens * per_row; i += kThreads) {
      const int row = i / per_row, c = i % per_row * 8;
      CopyAsync(base + (row * to_step + c) * 2, from + static_cast<int64_t>(row) * from_step + c);
    }
  }
  __device__ __forceinline__ void Fetch(int chunk) {
    const ChunkSpace<kKeys> from(p, blockIdx.x, chunk);
    Stage& to = s.stages[chunk % kStages];
    FetchRows(to.query, kWide, from.query, kKeys, kKeys);
    FetchRows(to.keys, kWide, from.keys, kKeys, kKeys);
    FetchRows(to.weights, kNarrow, from.weights, kTokens, kTokens);
    FetchRows(to.values, kNarrow, from.values + first_column, StateChunkValues(p.value_dim), kSlice);
    if constexpr (kDelta) {
      FetchRows(to.recall, kWide, from.recall, kKeys, kKeys);
      FetchRows(to.inverse, kNarrow, from.inverse, kTokens, kTokens);
    }
    if (threadIdx.x < kKeys / 4)
      CopyAsync(SharedAddress(to.total + 4 * threadIdx.x), from.total + 4 * threadIdx.x);
    if (threadIdx.x < kTokens / 4)
      CopyAsync(SharedAddress(to.rate + 4 * threadIdx.x), from.rate + 4 * threadIdx.x);
    if (chunk == p.chunk_begin) CommitCopies();
  }

  // sums[16 rows of the warp][32 columns of the warp] += a [64][kSteps * 16] b [kSteps * 16][64], or `steps` of those.
  template <int kSteps>
  __device__ __forceinline__ void Multiply(float (&sums)[4][4], const __nv_bfloat16* a, int a_step,
                                           const __nv_bfloat16* b, int steps = kSteps) {
    const uint32_t a_at = SharedAddress(a), b_at = SharedAddress(b);
#pragma unroll
    for (int k = 0; k < 16 * kSteps; k += 16) {
      if (k >= 16 * steps) break;
      uint32_t x[4];
      LoadA(x, a_at, a_step, 16 * (warp % 4), k);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t y[4];
        LoadBTransposed(y, b_at, kNarrow, warp / 4 * 32 + 8 * n, k);
        BF16Math::Mma(sums[n], x, y[0], y[1]);
        BF16Math::Mma(sums[n + 1], x, y[2], y[3]);
      }
    }
  }

  // The thread's pairs of a [64][64] product: token, column of the slice, and the two sums.
  template <typename Each>
  __device__ __forceinline__ void ForPairs(const float (&sums)[4][4], Each&& each) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        each(16 * (warp % 4) + lane / 4 + 8 * half, warp / 4 * 32 + 8 * n + lane % 4 * 2, sums[n][2 * half],
             sums[n][2 * half + 1]);
  }

  __device__ __forceinline__ void Advance(int chunk, const Stage& stage) {
    const StateBlock block = BlockAt(chunk);
    const int64_t first = (item.first_position / kTokens + chunk) * kTokens;
    const int first_row = static_cast<int>(first - item.first_position);  // of the item, of the chunk's first token
    const bool full = first_row + kTokens <= item.rows;
    const float4 none = {0, 0, 0, 0};
    float sums[4][4];
    const auto clear = [&] {
#pragma unroll
      for (auto& tile : sums) tile[0] = none.x, tile[1] = none.y, tile[2] = none.z, tile[3] = none.w;
    };
    clear();
    const auto store_u = [&](int t, int column, float x, float y) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
      *reinterpret_cast<__nv_bfloat162*>(&s.u[t * kNarrow + column]) = pair;
      const int row = first_row + t;
      if (kept && row >= 0 && row < item.rows && first_column + column < p.layout.value_stride)
        *reinterpret_cast<__nv_bfloat162*>(block.Row(p.layout.values, t) + 2 * (first_column + column)) = pair;
    };
    const auto value = [&](int t, int column) {
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values[t * kNarrow + column]));
    };
    if constexpr (kDelta) {
      Multiply<kKeys / 16>(sums, stage.recall, kWide, s.state);
      ForPairs(sums, [&](int t, int column, float x, float y) {
        const float2 v = value(t, column);
        *reinterpret_cast<__nv_bfloat162*>(&s.rest[t * kNarrow + column]) = __floats2bfloat162_rn(v.x - x, v.y - y);
      });
      __syncthreads();
      clear();
      Multiply<4>(sums, stage.inverse, kNarrow, s.rest, warp % 4 + 1);
      ForPairs(sums, store_u);
    } else {
      ForPairs(sums, [&](int t, int column, float, float) {
        const float2 v = value(t, column);
        store_u(t, column, v.x * stage.rate[t], v.y * stage.rate[t]);
      });
    }
    __syncthreads();
    clear();
    Multiply<kKeys / 16>(sums, stage.query, kWide, s.state);
    Multiply<4>(sums, stage.weights, kNarrow, s.u, warp % 4 + 1);
    // Elements of two bytes.
    const int64_t out_at = item.out_offset / 2 + static_cast<int64_t>(head) * p.value_dim;
    const int out_step = item.heads * p.value_dim;
    const bool pairs = p.value_dim % 2 == 0 && p.wire != WireType::kF32;
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    ForPairs(sums, [&](int t, int column, float x, float y) {
      const int row = first_row + t, c = first_column + column;
      if (row < 0 || row >= item.rows || c >= p.value_dim) return;
      const float2 v = skip != 0 ? value(t, column) : make_float2(0, 0);
      const int64_t at = out_at + static_cast<int64_t>(row) * out_step + c;
      if (pairs) {
        StoreWirePair(p.wire, p.out, at, x + skip * v.x, y + skip * v.y);
        return;
      }
      StoreWire(p.wire, p.out, at, x + skip * v.x);
      if (c + 1 < p.value_dim) StoreWire(p.wire, p.out, at + 1, y + skip * v.y);
    });
    if (!full) return;
    __syncthreads();  // S has been read
    AddTokens(stage);
    ShareState();
    if (kept) StoreState(block);
  }

  __device__ __forceinline__ void AddTokens(const Stage& stage) {
    const float low = stage.total[KeyRow()], high = stage.total[KeyRow() + 8];
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
      state[n][0] *= low, state[n][1] *= low, state[n][2] *= high, state[n][3] *= high;
    const uint32_t a_at = SharedAddress(stage.keys), b_at = SharedAddress(s.u);
#pragma unroll
    for (int t = 0; t < kTokens; t += 16) {
      uint32_t x[4];
      LoadATransposed(x, a_at, kWide, KeyRow() - lane / 4, t);
#pragma unroll
      for (int n = 0; n < kStateTiles; n += 2) {
        uint32_t y[4];
        LoadBTransposed(y, b_at, kNarrow, (kKeys == 128 ? 0 : warp / 4 * 32) + 8 * n, t);
        BF16Math::Mma(state[n], x, y[0], y[1]);
        BF16Math::Mma(state[n + 1], x, y[2], y[3]);
      }
    }
  }

  __device__ __forceinline__ void StoreState(const StateBlock& block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = KeyRow() + 8 * half;
      if (row >= p.key_dim) continue;
      std::byte* const at = block.Row(p.layout.state, row);
#pragma unroll
      for (int n = 0; n < kStateTiles; ++n) {
        const int c = first_column + StateColumn(n);
        if (c >= p.layout.value_stride) continue;
        if (p.state_bf16) {
          *reinterpret_cast<__nv_bfloat162*>(at + 2 * c) =
              __floats2bfloat162_rn(state[n][2 * half], state[n][2 * half + 1]);
        } else {
          *reinterpret_cast<float2*>(at + 4 * c) = make_float2(state[n][2 * half], state[n][2 * half + 1]);
        }
      }
    }
  }

  const StateLaunch& p;
  Shared& s;
  const StateItem item;
  const int head, first_column;
  int end;
  bool kept = false;  // the chunk's block is
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float state[kStateTiles][4];
};

template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads) StateChunksKernel(const __grid_constant__ StateLaunch p) {
  using Work = Chunks<kKeys, kDelta>;
  extern __shared__ __align__(16) std::byte memory[];
  Work(p, *reinterpret_cast<typename Work::Shared*>(memory), UnitOf(p, blockIdx.x)).Run();
}

template <int kKeys, bool kDelta>
int Launch(const StateLaunch& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Chunks<kKeys, kDelta>::Shared);
  auto* const kernel = StateChunksKernel<kKeys, kDelta>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(p.unit_count, StateChunkValues(p.value_dim) / kSlice), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int LaunchStateChunks(const StateLaunch* p, void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  if (p->key_dim <= 64) return p->delta ? Launch<64, true>(*p, on) : Launch<64, false>(*p, on);
  return p->delta ? Launch<128, true>(*p, on) : Launch<128, false>(*p, on);
}

}  // namespace dovetail::kernels::cuda
