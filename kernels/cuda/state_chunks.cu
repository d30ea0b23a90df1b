#include "kernels/cuda/state_chunk_parts.cuh"
#include "kernels/cuda/state_launches.h"

// The second kernel of the chunked form: chunk after chunk, a thread block a head and 32 value columns. Eight warps
// have S, in their accumulators (f32) and rounded to bf16 in shared memory, where products read it; eight others have
// o, which waits for S and u but makes nobody wait; four more load what the next chunks need.
//   u = inverse (v - recall S)   (or v times its rate)     o = query S + weights u     S = total S + keys^T u

namespace dovetail::kernels::cuda {
namespace {

constexpr int kRole = 256, kLoaders = 128;  // threads
constexpr int kThreads = 2 * kRole + kLoaders, kTokens = kStateTokens, kSlice = kStateChunkSlice;
constexpr int kNarrow = kTokens + 8, kThin = kSlice + 8;  // elements from row to row: no bank twice
constexpr int kTiles = 2;                                 // of 8 columns: a warp has 16 tokens and half the slice

template <int kKeys, bool kVector, bool kDelta>
struct ChunkStage {
  static constexpr bool kRecalls = kVector && kDelta;  // with decays that keys do not have
  static constexpr int kWide = kKeys + 8;
  alignas(16) __nv_bfloat16 query[kTokens * kWide], keys[kTokens * kWide], recall[kRecalls ? kTokens * kWide : 8];
  alignas(16) __nv_bfloat16 weights[kTokens * kNarrow], inverse[kDelta ? kTokens * kNarrow : 8];
  alignas(16) __nv_bfloat16 values[kTokens * kThin];
  alignas(16) float factors[kStateFactors * kTokens + kKeys];  // and the block's decays
};

template <int kKeys, bool kVector, bool kDelta>
struct ChunkShared {
  static constexpr int kStages = kDelta ? 2 : 3;
  ChunkStage<kKeys, kVector, kDelta> stages[kStages];
  alignas(16) __nv_bfloat16 state[2][kKeys * kThin];
  alignas(16) __nv_bfloat16 u[kDelta ? 2 : 1][kDelta ? kTokens * kThin : 8];
  alignas(16) __nv_bfloat16 rest[kDelta ? kTokens * kThin : 8];  // v - recall S
  uint64_t full[kStages], empty[kStages];
  uint64_t ready[2], drained[2];  // S and u of a chunk: can be read, have been read
};

__host__ __device__ __forceinline__ int Slices(const StateLaunch& p) {
  return StateChunkValues(p.value_dim) / kSlice;
}

// What all roles know.
template <int kKeys, bool kVector, bool kDelta>
class ChunkRole {
 public:
  using Stage = ChunkStage<kKeys, kVector, kDelta>;
  using Memory = ChunkShared<kKeys, kVector, kDelta>;
  static constexpr int kWide = Stage::kWide, kStages = Memory::kStages;

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

  const StateLaunch& p;
  Memory& s;
  const StateItem item;
  const int head, unit, first_column, count;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kRole / 32;
  const int token_row = warp % 4 * 16, token_column = warp / 4 * 16;  // of the warp's tile of tokens
};

// Loads chunks, as far ahead as there are stages.
template <int kKeys, bool kVector, bool kDelta>
class ChunkLoader : ChunkRole<kKeys, kVector, kDelta> {
  using Base = ChunkRole<kKeys, kVector, kDelta>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::kStages;
  using Stage = typename Base::Stage;

 public:
  using Base::Base;
  __device__ void Run() {
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      BarrierWait(SharedAddress(&s.empty[stage]), (i / kStages + 1) % 2);
      Load(i, s.stages[stage]);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(&s.full[stage])) : "memory");
    }
  }

 private:
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
  __device__ __forceinline__ void Load(int i, Stage& to) const {
    const ChunkSpace<kKeys> space(p, this->unit, p.chunk_begin + i);
    if (StateChunksAreDirect(p)) {
      LoadPayload(i, to);
    } else {
      LoadTile<kKeys / 8>(to.query, Stage::kWide, space.query, 2 * kKeys);
      LoadTile<kKeys / 8>(to.keys, Stage::kWide, space.keys, 2 * kKeys);
      if constexpr (Stage::kRecalls) LoadTile<kKeys / 8>(to.recall, Stage::kWide, space.recall, 2 * kKeys);
      LoadTile<kSlice / 8>(to.values, kThin, space.values + first_column, 2 * StateChunkValues(p.value_dim));
    }
    LoadTile<kTokens / 8>(to.weights, kNarrow, space.weights, 2 * kTokens);
    if constexpr (kDelta) LoadTile<kTokens / 8>(to.inverse, kNarrow, space.inverse, 2 * kTokens);
    if (thread < (kStateFactors * kTokens + kKeys) / 4)
      CopyAsync(SharedAddress(to.factors + 4 * thread), space.factors + 4 * thread);
  }
  // Tokens from before the item come from its block.
  __device__ __forceinline__ void LoadPayload(int i, Stage& to) const {
    const int first_row = this->FirstRow(i), rows = item.rows;
    const int64_t key_step = int64_t{2} * item.heads * kKeys, value_step = int64_t{2} * item.heads * p.value_dim;
    const int64_t at_key = first_row * key_step + 2 * head * kKeys;
    const std::byte* const query = p.query + item.query_offset + at_key;
    const std::byte* const key = p.key_value + item.key_offset + at_key;
    const std::byte* const value =
        p.key_value + item.value_offset + first_row * value_step + 2 * (head * p.value_dim + first_column);
    const bool whole = first_row >= 0 && first_row + kTokens <= rows && first_column + kSlice <= p.value_dim;
    if (whole && IsAligned(query) && IsAligned(key) && IsAligned(value)) {
      LoadTile<kKeys / 8>(to.query, Stage::kWide, query, key_step);
      LoadTile<kKeys / 8>(to.keys, Stage::kWide, key, key_step);
      LoadTile<kSlice / 8>(to.values, kThin, value, value_step);
      return;
    }
    const StateBlock block = this->BlockAt(i);
    const auto old_or_new = [&](const StateSection& section, const std::byte* from, int row, int64_t row_step,
                                int column) -> const std::byte* {
      if (first_row + row >= rows) return nullptr;
      return first_row + row < 0 ? block.Row(section, row) + 2 * column : from + row * row_step;
    };
    LoadRows<kKeys / 8>(to.query, Stage::kWide, [&](int row, int at) -> const std::byte* {
      const bool there = first_row + row >= 0 && first_row + row < rows;
      return there ? query + row * key_step + 16 * at : nullptr;
    });
    LoadRows<kKeys / 8>(to.keys, Stage::kWide, [&](int row, int at) {
      return old_or_new(p.layout.keys, key + 16 * at, row, key_step, 8 * at);
    });
    LoadRows<kSlice / 8>(to.values, kThin, [&](int row, int at) -> const std::byte* {
      if (first_column + 8 * at >= p.value_dim) return nullptr;
      return old_or_new(p.layout.values, value + 16 * at, row, value_step, first_column + 8 * at);
    });
  }

  const int thread = threadIdx.x % kLoaders;
};

// Has S: 16 of its rows a warp, and all columns or half of them.
template <int kKeys, bool kVector, bool kDelta>
class ChunkState : ChunkRole<kKeys, kVector, kDelta> {
  using Base = ChunkRole<kKeys, kVector, kDelta>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::lane, Base::warp, Base::kWide,
      Base::kStages, Base::token_row, Base::token_column;
  using Stage = typename Base::Stage;
  static constexpr int kStateTiles = kKeys == 128 ? 4 : 2;

 public:
  using Base::Base;
  __device__ void Run() {
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
    AddTokens(stage, keys, kDelta ? s.u[kDelta ? i % 2 : 0] : stage.values);
    // S of the chunk before last lay where the next one is to lie.
    if (i > 0) BarrierWait(SharedAddress(&s.drained[(i + 1) % 2]), (i - 1) / 2 % 2);
    ShareState(i + 1);
    if (kept) StoreState(this->BlockAt(i));
  }

  // u, and where it is kept.
  __device__ __forceinline__ void Solve(int i, const Stage& stage) {
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
      if (16 * k > token_row) break;
      uint32_t x[4];
      LoadA(x, SharedAddress(stage.inverse), kNarrow, token_row, 16 * k);
      this->MultiplyStep(u, x, SharedAddress(s.rest), 16 * k, token_column);
    }
    __nv_bfloat16* const to = s.u[kDelta ? i % 2 : 0];
    this->ForPairs(u, token_row, token_column, [&](int t, int column, float x, float y) {
      *reinterpret_cast<__nv_bfloat162*>(to + t * kThin + column) = __floats2bfloat162_rn(x, y);
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

  // keys^T, faded to the block's end.
  __device__ __forceinline__ void LoadKeys(const Stage& stage, uint32_t (&keys)[4][4]) const {
    const uint32_t at = SharedAddress(stage.keys);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      LoadATransposed(keys[k], at, kWide, state_row, 16 * k);
      if constexpr (!kVector) {
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

// Has o: 16 tokens and half the columns a warp.
template <int kKeys, bool kVector, bool kDelta>
class ChunkOutput : ChunkRole<kKeys, kVector, kDelta> {
  using Base = ChunkRole<kKeys, kVector, kDelta>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::lane, Base::kWide,
      Base::kStages, Base::token_row, Base::token_column;
  using Stage = typename Base::Stage;

 public:
  using Base::Base;
  __device__ void Run() {
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    for (int i = 0; i < count; ++i) {
      const Stage& stage = s.stages[i % kStages];
      BarrierWait(SharedAddress(&s.full[i % kStages]), i / kStages % 2);
      float sums[kTiles][4] = {};
      Multiply(i, stage, sums);
      if (skip != 0) Skip(stage, skip, sums);
      this->Arrive(s.empty[i % kStages]);
      Store(this->FirstRow(i), sums);
    }
  }

 private:
  __device__ __forceinline__ void Multiply(int i, const Stage& stage, float (&sums)[kTiles][4]) const {
    uint32_t query[kKeys / 16][4], weights[4][4];
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) LoadA(query[k], SharedAddress(stage.query), kWide, token_row, 16 * k);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (16 * k <= token_row) LoadA(weights[k], SharedAddress(stage.weights), kNarrow, token_row, 16 * k);
    BarrierWait(SharedAddress(&s.ready[i % 2]), i / 2 % 2);
    const uint32_t state_at = SharedAddress(s.state[i % 2]);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) this->MultiplyStep(sums, query[k], state_at, 16 * k, token_column);
    if constexpr (!kVector) {
      const float low = stage.factors[kFrom * kTokens + token_row + lane / 4];
      const float high = stage.factors[kFrom * kTokens + token_row + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) sums[n][0] *= low, sums[n][1] *= low, sums[n][2] *= high, sums[n][3] *= high;
    }
    const uint32_t u_at = SharedAddress(kDelta ? s.u[kDelta ? i % 2 : 0] : stage.values);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (16 * k <= token_row) this->MultiplyStep(sums, weights[k], u_at, 16 * k, token_column);
    this->Arrive(s.drained[i % 2]);
  }
  __device__ __forceinline__ void Skip(const Stage& stage, float skip, float (&sums)[kTiles][4]) const {
    this->ForPairs(sums, token_row, token_column, [&](int t, int column, float& x, float& y) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values[t * kThin + column]));
      x += skip * v.x, y += skip * v.y;
    });
  }

  __device__ __forceinline__ void Store(int first_row, float (&sums)[kTiles][4]) const {
    const int64_t step = int64_t{item.heads} * p.value_dim;  // elements, of two bytes
    const int row = first_row + token_row + lane / 4, column = first_column + token_column + lane % 4 * 2;
    const int64_t at = item.out_offset / 2 + static_cast<int64_t>(head) * p.value_dim + row * step + column;
    const bool whole = first_row >= 0 && first_row + kTokens <= item.rows && first_column + kSlice <= p.value_dim;
    if (whole && p.value_dim % 2 == 0 && p.wire == WireType::kBF16) {
      auto* const to = reinterpret_cast<__nv_bfloat16*>(p.out) + at;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          *reinterpret_cast<__nv_bfloat162*>(to + 8 * half * step + 8 * n) =
              __floats2bfloat162_rn(sums[n][2 * half], sums[n][2 * half + 1]);
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < 0 || row + 8 * half >= item.rows) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int c = column + 8 * n;
        const int64_t place = at + 8 * half * step + 8 * n;
        const float x = half == 0 ? sums[n][0] : sums[n][2], y = half == 0 ? sums[n][1] : sums[n][3];
        if (c < p.value_dim) StoreWire(p.wire, p.out, place, x);
        if (c + 1 < p.value_dim) StoreWire(p.wire, p.out, place + 1, y);
      }
    }
  }
};

template <int kKeys, bool kVector, bool kDelta>
__global__ void __launch_bounds__(kThreads, 1) StateChunksKernel(const __grid_constant__ StateLaunch p) {
  using Memory = ChunkShared<kKeys, kVector, kDelta>;
  extern __shared__ __align__(16) std::byte memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const StateUnit unit = UnitOf(p, blockIdx.x / Slices(p));
  if (p.chunk_begin >= ChunksOf(p.items[unit.item])) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      BarrierInit(SharedAddress(&s.full[i]), kLoaders);
      BarrierInit(SharedAddress(&s.empty[i]), 2 * kRole / 32);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(SharedAddress(&s.ready[i]), kRole / 32);
      BarrierInit(SharedAddress(&s.drained[i]), kRole / 32);
    }
  }
  __syncthreads();
  switch (threadIdx.x / kRole) {
    case 0: return ChunkState<kKeys, kVector, kDelta>(p, s, unit).Run();
    case 1: return ChunkOutput<kKeys, kVector, kDelta>(p, s, unit).Run();
    default: return ChunkLoader<kKeys, kVector, kDelta>(p, s, unit).Run();
  }
}

template <int kKeys, bool kVector, bool kDelta>
int Launch(const StateLaunch& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ChunkShared<kKeys, kVector, kDelta>);
  auto* const kernel = StateChunksKernel<kKeys, kVector, kDelta>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.unit_count * Slices(p), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <int kKeys>
int LaunchFor(const StateLaunch& p, cudaStream_t stream) {
  if (p.vector_decay) return p.delta ? Launch<kKeys, true, true>(p, stream) : Launch<kKeys, true, false>(p, stream);
  return p.delta ? Launch<kKeys, false, true>(p, stream) : Launch<kKeys, false, false>(p, stream);
}

}  // namespace

int LaunchStateChunks(const StateLaunch* p, void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  return p->key_dim <= 64 ? LaunchFor<64>(*p, on) : LaunchFor<128>(*p, on);
}

}  // namespace dovetail::kernels::cuda
