#pragma once
#include "kernels/cuda/state_chunk_parts.cuh"

// Roles of the warps that go from chunk to chunk: a thread block has a head and 32 value columns of it. Eight warps
// have S, in their accumulators (f32) and rounded to bf16 in shared memory, where products read it; others have o,
// which waits for S but makes nobody wait; four more load what the next chunks need. Device code only.
//
// Memory, what the thread block shares: kKeys, kVector, kDelta, kFadesValues, kStages, Stage stages[kStages];
// state[2][], S before a chunk; of a delta rule u[2][] and rest[]; faded[2][], what S adds of tokens, faded to the
// chunk's end: u of a delta rule with one decay a token, values with kFadesValues (else keys are faded); barriers
// full[], empty[] of the stages, ready[2] and drained[2] of S and u: can be read, have been read.

namespace dovetail::kernels::cuda {

constexpr int kRole = 256, kLoaders = 128;  // threads
constexpr int kTokens = kStateTokens, kSlice = kStateChunkSlice;
constexpr int kNarrow = kTokens + 8, kThin = kSlice + 8;  // elements from row to row: no bank twice
constexpr int kTiles = 2;                                 // of 8 columns: a warp has 16 tokens and half the slice

__host__ __device__ __forceinline__ int Slices(const StateLaunch& p) {
  return StateChunkValues(p.value_dim) / kSlice;
}

// What all roles know.
template <typename Memory>
class ChunkRole {
 public:
  using Stage = typename Memory::Stage;
  static constexpr int kKeys = Memory::kKeys, kWide = kKeys + 8, kStages = Memory::kStages;

  __device__ ChunkRole(const StateLaunch& launch, Memory& shared, const StateUnit& of)
      : p(launch), s(shared), item(p.items[of.item]), head(of.head), unit(blockIdx.x / Slices(launch)),
        first_column(blockIdx.x % Slices(launch) * kSlice), count(min(p.chunk_end, ChunksOf(item)) - p.chunk_begin) {}

 protected:
  __device__ __forceinline__ StateBlock BlockAt(int i) const {  // chunk i of this launch
    return BlockOf(p, item, head, item.first_position / kTokens + p.chunk_begin + i);
  }
  // Of the item, of the chunk's first token; negative with old tokens.
  __device__ __forceinline__ int FirstRow(int i) const {
    return static_cast<int>((item.first_position / kTokens + p.chunk_begin + i) * kTokens - item.first_position);
  }
  __device__ __forceinline__ void Arrive(uint64_t& bar) const {
    __syncwarp();
    if (lane == 0) BarrierArrive(SharedAddress(&bar));
  }
  // sums += a b: a in registers, 16 rows of b [..][kThin] from k on, 8 kCount columns from `column` on.
  template <int kCount>
  __device__ __forceinline__ static void MultiplyStep(float (&sums)[kCount][4], const uint32_t (&x)[4], uint32_t b_at,
                                                      int k, int column) {
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32_t y[4];
      LoadBTransposed(y, b_at, kThin, column + 8 * n, k);
      BF16Math::Mma(sums[n], x, y[0], y[1]);
      BF16Math::Mma(sums[n + 1], x, y[2], y[3]);
    }
  }
  // The thread's pairs of a tile of 16 rows from `row` on: row, column, and the two sums.
  template <int kCount, typename Each>
  __device__ __forceinline__ void ForPairs(float (&sums)[kCount][4], int row, int column, Each&& each) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        each(row + lane / 4 + 8 * half, column + 8 * n + lane % 4 * 2, sums[n][2 * half], sums[n][2 * half + 1]);
  }

  // o += skip v.
  template <int kCount>
  __device__ __forceinline__ void Skip(const Stage& stage, float skip, int row, int column,
                                       float (&sums)[kCount][4]) const {
    ForPairs(sums, row, column, [&](int t, int c, float& x, float& y) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values[t * kThin + c]));
      x += skip * v.x, y += skip * v.y;
    });
  }
  // o of 16 tokens, 8 kCount columns.
  template <int kCount>
  __device__ __forceinline__ void StoreOutput(int first_row, int tile_row, int tile_column,
                                              float (&sums)[kCount][4]) const {
    const int64_t step = int64_t{item.heads} * p.value_dim;  // elements, of two bytes
    const int row = first_row + tile_row + lane / 4, column = first_column + tile_column + lane % 4 * 2;
    const int64_t at = item.out_offset / 2 + static_cast<int64_t>(head) * p.value_dim + row * step + column;
    const bool whole = first_row >= 0 && first_row + kTokens <= item.rows && first_column + kSlice <= p.value_dim;
    if (whole && p.value_dim % 2 == 0 && p.wire == WireType::kBF16) {
      auto* const to = reinterpret_cast<__nv_bfloat16*>(p.out) + at;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kCount; ++n)
          *reinterpret_cast<__nv_bfloat162*>(to + 8 * half * step + 8 * n) =
              __floats2bfloat162_rn(sums[n][2 * half], sums[n][2 * half + 1]);
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < 0 || row + 8 * half >= item.rows) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int c = column + 8 * n;
        const int64_t place = at + 8 * half * step + 8 * n;
        const float x = half == 0 ? sums[n][0] : sums[n][2], y = half == 0 ? sums[n][1] : sums[n][3];
        if (c < p.value_dim) StoreWire(p.wire, p.out, place, x);
        if (c + 1 < p.value_dim) StoreWire(p.wire, p.out, place + 1, y);
      }
    }
  }

  const StateLaunch& p;
  Memory& s;
  const StateItem item;
  const int head, unit, first_column, count;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kRole / 32;
  const int token_row = warp % 4 * 16, token_column = warp / 4 * 16;  // of the warp's tile of tokens
};

// Brings q, k and v as they lie in payloads.
template <typename Memory>
class PayloadLoader : protected ChunkRole<Memory> {
 protected:
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::kKeys, Base::kStages;
  using Stage = typename Base::Stage;
  using Base::Base;

  // 64 rows of kCount sixteen bytes, `row_bytes` apart.
  template <int kCount>
  __device__ __forceinline__ void LoadTile(__nv_bfloat16* to, int step, const void* from, int64_t row_bytes) const {
    constexpr int kAtOnce = kLoaders / kCount;  // rows
    const int row = thread / kCount, at = thread % kCount;
    const std::byte* source = static_cast<const std::byte*>(from) + row * row_bytes + 16 * at;
    uint32_t place = SharedAddress(to) + 2 * (row * step + 8 * at);
#pragma unroll
    for (int i = 0; i < kTokens / kAtOnce; ++i) {
      CopyAsync(place, source);
      source += kAtOnce * row_bytes, place += 2 * kAtOnce * step;
    }
  }
  // The same, each where `from(row, i)` says; null: zeros.
  template <int kCount, typename From>
  __device__ __forceinline__ void LoadRows(__nv_bfloat16* to, int step, From&& from) const {
    const uint32_t base = SharedAddress(to);
#pragma unroll 1
    for (int i = thread; i < kTokens * kCount; i += kLoaders) {
      const int row = i / kCount, at = i % kCount;
      const std::byte* const source = from(row, at);
      CopyPayloadAsync(base + 2 * (row * step + 8 * at), source != nullptr ? source : p.query, source != nullptr);
    }
  }
  // Tokens from before the item come from its block.
  __device__ __forceinline__ const std::byte* OldOrNew(int i, const StateSection& section, const std::byte* from,
                                                       int row, int64_t step, int column) const {
    const int in_item = this->FirstRow(i) + row;
    if (in_item >= item.rows) return nullptr;
    return in_item < 0 ? this->BlockAt(i).Row(section, row) + 2 * column : from + row * step;
  }
  __device__ __forceinline__ void LoadHeads(int i, Stage& to) const {
    const int first_row = this->FirstRow(i), rows = item.rows;
    const int64_t step = int64_t{2} * item.heads * kKeys, at = first_row * step + 2 * head * kKeys;
    const std::byte* const query = p.query + item.query_offset + at;
    const std::byte* const key = p.key_value + item.key_offset + at;
    if (first_row >= 0 && first_row + kTokens <= rows && IsAligned(query) && IsAligned(key)) {
      LoadTile<kKeys / 8>(to.query, Base::kWide, query, step);
      LoadTile<kKeys / 8>(to.keys, Base::kWide, key, step);
      return;
    }
    LoadRows<kKeys / 8>(to.query, Base::kWide, [&](int row, int at) -> const std::byte* {
      const bool there = first_row + row >= 0 && first_row + row < rows;
      return there ? query + row * step + 16 * at : nullptr;
    });
    LoadRows<kKeys / 8>(to.keys, Base::kWide,
                        [&](int row, int at) { return OldOrNew(i, p.layout.keys, key + 16 * at, row, step, 8 * at); });
  }
  __device__ __forceinline__ void LoadValues(int i, Stage& to) const {
    const int first_row = this->FirstRow(i);
    const int64_t step = int64_t{2} * item.heads * p.value_dim;
    const std::byte* const value =
        p.key_value + item.value_offset + first_row * step + 2 * (head * p.value_dim + first_column);
    const bool whole = first_row >= 0 && first_row + kTokens <= item.rows && first_column + kSlice <= p.value_dim;
    if (whole && IsAligned(value)) return LoadTile<kSlice / 8>(to.values, kThin, value, step);
    LoadRows<kSlice / 8>(to.values, kThin, [&](int row, int at) -> const std::byte* {
      if (first_column + 8 * at >= p.value_dim) return nullptr;
      return OldOrNew(i, p.layout.values, value + 16 * at, row, step, first_column + 8 * at);
    });
  }

  const int thread = threadIdx.x % kLoaders;
};

// Has S: 16 of its rows a warp, and all columns or half of them.
template <typename Memory>
class ChunkState : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::lane, Base::warp, Base::kKeys,
      Base::kWide, Base::kStages, Base::token_row, Base::token_column;
  using Stage = typename Base::Stage;
  static constexpr bool kVector = Memory::kVector, kDelta = Memory::kDelta;
  static constexpr bool kFadesTokens = kDelta && !kVector, kFadesValues = Memory::kFadesValues;
  static constexpr int kStateTiles = kKeys == 128 ? 4 : 2;

 public:
  using Base::Base;
  __device__ void Run() {
    if constexpr (kFadesValues) {
      BarrierWait(SharedAddress(&s.full[0]), 0);
      FadeValues(0);
    }
    LoadState();
    const std::byte* entry = *this->BlockAt(0).entries;
    for (int i = 0; i < count; ++i) {
      kept = entry != nullptr;
      if (i + 1 < count) entry = *this->BlockAt(i + 1).entries;
      BarrierWait(SharedAddress(&s.full[i % kStages]), i / kStages % 2);
      Advance(i, s.stages[i % kStages]);
      this->Arrive(s.empty[i % kStages]);
    }
    if (p.carry != nullptr && count == p.chunk_end - p.chunk_begin) StoreCarry();
  }

 private:
  __device__ __forceinline__ static void Sync() { asm volatile("bar.sync 1, %0;" ::"n"(kRole) : "memory"); }
  template <typename Each>
  __device__ __forceinline__ void ForState(Each&& each) {
    this->ForPairs(state, state_row, state_column, each);
  }
  __device__ __forceinline__ float* Carry(int row, int column) const {
    const int width = StateChunkValues(p.value_dim);
    return p.carry + (static_cast<int64_t>(this->unit) * kKeys + row) * width + first_column + column;
  }

  __device__ __forceinline__ void LoadState() {
    const bool carried = p.chunk_begin > 0;
    const bool fresh = !carried && item.first_position < kTokens;
    const StateBlock before = this->BlockAt(carried || fresh ? 0 : -1);
    ForState([&](int row, int column, float& x, float& y) {
      float2 pair = {0, 0};
      if (carried) {
        pair = *reinterpret_cast<const float2*>(Carry(row, column));
      } else if (!fresh && row < p.key_dim && first_column + column < p.layout.value_stride) {
        const std::byte* at = before.Row(p.layout.state, row);
        if (p.state_bf16) {
          pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at + 2 * (first_column + column)));
        } else {
          pair = *reinterpret_cast<const float2*>(at + 4 * (first_column + column));
        }
      }
      x = pair.x, y = pair.y;
    });
    ShareState(0);
  }
  __device__ __forceinline__ void ShareState(int i) {
    __nv_bfloat16* const to = s.state[i % 2];
    ForState([&](int row, int column, float x, float y) {
      *reinterpret_cast<__nv_bfloat162*>(to + row * kThin + column) = __floats2bfloat162_rn(x, y);
    });
    Sync();
  }
  __device__ __forceinline__ void StoreCarry() {
    ForState([&](int row, int column, float x, float y) {
      *reinterpret_cast<float2*>(Carry(row, column)) = make_float2(x, y);
    });
  }

  __device__ __forceinline__ void Advance(int i, const Stage& stage) {
    if constexpr (!kDelta) this->Arrive(s.ready[i % 2]);
    uint32_t keys[4][4];
    LoadKeys(stage, keys);
    if constexpr (kDelta) Solve(i, stage);
    if (this->FirstRow(i) + kTokens > item.rows) return;  // the last one, not full
    const __nv_bfloat16* tokens = stage.values;
    if constexpr (kFadesValues) {
      tokens = s.faded[i % 2];
    } else if constexpr (kDelta) {
      tokens = kFadesTokens ? s.faded[0] : s.u[i % 2];
    }
    AddTokens(stage, keys, tokens);
    if constexpr (kFadesValues) {
      if (i + 1 < count) {
        BarrierWait(SharedAddress(&s.full[(i + 1) % kStages]), (i + 1) / kStages % 2);
        FadeValues(i + 1);
      }
    }
    // S of the chunk before last lay where the next one is to lie.
    if (i > 0) BarrierWait(SharedAddress(&s.drained[(i + 1) % 2]), (i - 1) / 2 % 2);
    ShareState(i + 1);
    if (kept) StoreState(this->BlockAt(i));
  }

  // u, and where it is kept.
  __device__ __forceinline__ void Solve(int i, const Stage& stage) {
    uint32_t inverse[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (16 * k <= token_row) LoadA(inverse[k], SharedAddress(stage.inverse), kNarrow, token_row, 16 * k);
    float recalled[2][kTiles][4] = {};
    const uint32_t a_at = SharedAddress(Stage::kRecalls ? stage.recall : stage.keys);
    const uint32_t b_at = SharedAddress(s.state[i % 2]);
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t x[4];
      LoadA(x, a_at, kWide, token_row, k);
      this->MultiplyStep(recalled[k / 16 % 2], x, b_at, k, token_column);  // two sums: half as many wait
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) recalled[0][n][j] += recalled[1][n][j];
    this->ForPairs(recalled[0], token_row, token_column, [&](int t, int column, float x, float y) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values[t * kThin + column]));
      const float factor = Stage::kRecalls ? 1.0f : stage.factors[kRecall * kTokens + t];
      *reinterpret_cast<__nv_bfloat162*>(&s.rest[t * kThin + column]) =
          __floats2bfloat162_rn(v.x - factor * x, v.y - factor * y);
    });
    Sync();
    float u[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (16 * k <= token_row) this->MultiplyStep(u, inverse[k], SharedAddress(s.rest), 16 * k, token_column);
    }
    __nv_bfloat16* const to = s.u[kDelta ? i % 2 : 0];
    this->ForPairs(u, token_row, token_column, [&](int t, int column, float x, float y) {
      *reinterpret_cast<__nv_bfloat162*>(to + t * kThin + column) = __floats2bfloat162_rn(x, y);
      if constexpr (kFadesTokens) {
        const float factor = stage.factors[kTo * kTokens + t];
        *reinterpret_cast<__nv_bfloat162*>(s.faded[0] + t * kThin + column) =
            __floats2bfloat162_rn(factor * x, factor * y);
      }
    });
    this->Arrive(s.ready[i % 2]);
    Sync();
    if (kept) StoreValues(i, u);
  }
  __device__ __forceinline__ void StoreValues(int i, float (&u)[kTiles][4]) const {
    const StateBlock block = this->BlockAt(i);
    const int first_row = this->FirstRow(i);
    this->ForPairs(u, token_row, token_column, [&](int t, int column, float x, float y) {
      if (first_row + t >= 0 && first_row + t < item.rows && first_column + column < p.layout.value_stride)
        *reinterpret_cast<__nv_bfloat162*>(block.Row(p.layout.values, t) + 2 * (first_column + column)) =
            __floats2bfloat162_rn(x, y);
    });
  }

  // Values, times what is left of them at the chunk's end; rates are in it.
  __device__ __forceinline__ void FadeValues(int i) {
    const Stage& stage = s.stages[i % kStages];
    const int t = threadIdx.x / (kSlice / 8), c = threadIdx.x % (kSlice / 8) * 8;
    const float factor = stage.factors[kTo * kTokens + t];
    float v[8];
    LoadWire8(WireType::kBF16, stage.values, t * kThin + c, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= factor;
    StoreWire8(WireType::kBF16, s.faded[i % 2], t * kThin + c, v);
  }

  // keys^T, faded to the block's end unless tokens are.
  __device__ __forceinline__ void LoadKeys(const Stage& stage, uint32_t (&keys)[4][4]) const {
    const uint32_t at = SharedAddress(stage.keys);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      LoadATransposed(keys[k], at, kWide, state_row, 16 * k);
      if constexpr (!kVector && !kFadesTokens && !kFadesValues) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 factor =
              *reinterpret_cast<const float2*>(&stage.factors[kTo * kTokens + 16 * k + lane % 4 * 2 + j / 2 * 8]);
          const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&keys[k][j]));
          keys[k][j] = BF16Math::Pack(x.x * factor.x, x.y * factor.y);
        }
      }
    }
  }
  __device__ __forceinline__ void AddTokens(const Stage& stage, const uint32_t (&keys)[4][4], const __nv_bfloat16* u) {
    const float* const total = stage.factors + kStateFactors * kTokens;
    const float low = total[state_row + lane / 4], high = total[state_row + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
      state[n][0] *= low, state[n][1] *= low, state[n][2] *= high, state[n][3] *= high;
#pragma unroll
    for (int k = 0; k < 4; ++k) this->MultiplyStep(state, keys[k], SharedAddress(u), 16 * k, state_column);
  }

  __device__ __forceinline__ void StoreState(const StateBlock& block) {
    ForState([&](int row, int column, float x, float y) {
      const int c = first_column + column;
      if (row >= p.key_dim || c >= p.layout.value_stride) return;
      std::byte* const at = block.Row(p.layout.state, row);
      if (p.state_bf16) {
        *reinterpret_cast<__nv_bfloat162*>(at + 2 * c) = __floats2bfloat162_rn(x, y);
      } else {
        *reinterpret_cast<float2*>(at + 4 * c) = make_float2(x, y);
      }
    });
  }

  bool kept = false;  // the chunk's block is
  const int state_row = (kKeys == 128 ? warp : warp % 4) * 16, state_column = kKeys == 128 ? 0 : warp / 4 * 16;
  float state[kStateTiles][4];
};

}  // namespace dovetail::kernels::cuda
