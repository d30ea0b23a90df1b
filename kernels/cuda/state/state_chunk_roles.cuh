#pragma once
#include "kernels/cuda/primitives/warp_arrivals.cuh"
#include "kernels/cuda/state/state_chunk_tiles.cuh"

// Roles of the warps that go from chunk to chunk: a thread block has a head and a slice of its value columns. Two
// warpgroups have S, in their accumulators (f32) and rounded to bf16 in shared memory, where products read it; two have
// o, of every other chunk each: they wait for S, and no warp waits for them. One more loads what the next chunks need.
// Where heads are few, several thread blocks (blockIdx.y) share a slice's chunks: each has o of its own, and goes
// through those before them for S alone, which has the same bits so. Device code only.
//
// Memory, what the thread block shares: kKeys, kSlice, kVector, kDelta, kFadesValues, kShares (its chunks with other
// thread blocks, as above), kStages, Stage stages[kStages], of tiles;
// state[2], S before a chunk; of a delta rule u[2] and rest; faded[2], what S adds of tokens, faded to the chunk's end:
// u of a delta rule with one decay a token (faded[0]), values with kFadesValues (else keys are faded); barriers full[],
// empty[] of the stages, ready[2] and drained[2] of S and u: can be read, have been read. racecheck: warp_arrivals.cuh.

namespace dovetail::kernels::cuda {

constexpr int kRole = 256, kLoaders = 128, kGroup = 128;  // threads
constexpr int kChunkThreads = 2 * kRole + kLoaders;
constexpr int kTokens = kStateTokens;
static_assert(kTokens == kTileTokens);

__host__ __device__ __forceinline__ int Slices(const StateLaunch& p, int width) {
  return (p.value_dim + width - 1) / width;
}

// The first chunk of thread block `segment` of `segments`, which share `chunks`: even, so that o and its buffers go on
// in turn. S alone takes kPassing of a chunk's time.
__device__ __forceinline__ int SegmentBegin(int segment, int segments, int chunks) {
  constexpr float kPassing = 0.5f;
  if (segment == segments) return chunks;
  float share = 0, all = 0, each = 1;
  for (int i = 0; i < segments; ++i, each *= 1 - kPassing) {
    if (i == segment) share = all;
    all += each;
  }
  return static_cast<int>(share / all * chunks) / 2 * 2;
}

// What all roles know.
template <typename Memory>
class ChunkRole {
 public:
  using Stage = typename Memory::Stage;
  static constexpr int kKeys = Memory::kKeys, kSlice = Memory::kSlice, kStages = Memory::kStages;
  using TokenTile = ThinTile<kTokens, kSlice>;

  __device__ ChunkRole(const StateLaunch& launch, Memory& shared, const StateUnit& of)
      : p(launch),
        s(shared),
        item(p.items[of.item]),
        head(of.head),
        unit(blockIdx.x / Slices(launch, kSlice)),
        first_column(blockIdx.x % Slices(launch, kSlice) * kSlice),
        begin(Memory::kShares ? SegmentBegin(blockIdx.y, gridDim.y, Chunks(p, item)) : 0),
        count(Memory::kShares ? SegmentBegin(blockIdx.y + 1, gridDim.y, Chunks(p, item)) : Chunks(p, item)) {}

  // Of the launch.
  __device__ __forceinline__ static int Chunks(const StateLaunch& p, const StateItem& item) {
    return min(p.chunk_end, ChunksOf(item)) - p.chunk_begin;
  }

 protected:
  __device__ __forceinline__ StateBlock BlockAt(int i) const {  // chunk i of this launch
    return BlockOf(p, item, head, item.first_position / kTokens + p.chunk_begin + i);
  }
  // Whether another thread block has its o, and this one goes through it for S alone.
  __device__ __forceinline__ bool Passes(int i) const { return Memory::kShares && i < begin; }
  // Of the item, of the chunk's first token; negative with old tokens.
  __device__ __forceinline__ int FirstRow(int i) const {
    return static_cast<int>((item.first_position / kTokens + p.chunk_begin + i) * kTokens - item.first_position);
  }
  __device__ __forceinline__ static void Wait(const uint64_t& bar, int phase) {
    BarrierWait(SharedAddress(&bar), phase % 2);
    __syncwarp();
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
      const __nv_bfloat16* const at = stage.values.data + TokenTile::At(t, c);
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
      x += skip * v.x, y += skip * v.y;
    });
  }
  // o of 16 tokens, the slice's columns.
  __device__ __forceinline__ void StoreOutput(int first_row, float (&sums)[kSlice / 8][4]) const {
    const int64_t step = int64_t{item.heads} * p.value_dim;  // elements, of two bytes
    const int row = first_row + token_row + lane / 4, column = first_column + lane % 4 * 2;
    const int64_t at = item.out_offset / 2 + static_cast<int64_t>(head) * p.value_dim + row * step;
    const bool whole = first_row >= 0 && first_row + kTokens <= item.rows && first_column + kSlice <= p.value_dim;
    if (whole && p.value_dim % 8 == 0 && p.wire == WireType::kBF16 && IsAligned(p.out + item.out_offset)) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int first = 0; first < kSlice / 8; first += 4) {
          uint32_t words[4];  // two columns of each tile; then all of one
#pragma unroll
          for (int n = 0; n < 4; ++n)
            words[n] = BF16Math::Pack(sums[first + n][2 * half], sums[first + n][2 * half + 1]);
          TurnFour(words);
          const int64_t place = at + 8 * half * step + first_column + 8 * first + lane % 4 * 8;
          *reinterpret_cast<uint4*>(p.out + 2 * place) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half < 0 || row + 8 * half >= item.rows) continue;
#pragma unroll
      for (int n = 0; n < kSlice / 8; ++n) {
        const int c = column + 8 * n;
        const int64_t place = at + 8 * half * step + c;
        const float x = half == 0 ? sums[n][0] : sums[n][2], y = half == 0 ? sums[n][1] : sums[n][3];
        if (c < p.value_dim) StoreWire(p.wire, p.out, place, x);
        if (c + 1 < p.value_dim) StoreWire(p.wire, p.out, place + 1, y);
      }
    }
  }
  // Word i of lane j of each four becomes word j of lane i.
  __device__ __forceinline__ void TurnFour(uint32_t (&words)[4]) const {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool high = (lane & step) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & step) != 0) continue;
        const uint32_t other = __shfl_xor_sync(~0u, high ? words[i] : words[i + step], step);
        (high ? words[i] : words[i + step]) = other;
      }
    }
  }

  const StateLaunch& p;
  Memory& s;
  const StateItem item;
  const int head, unit, first_column;
  const int begin, count;  // has o of chunks [begin, count); S of those before, too
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kRole / 32;
  // Known to be the same for all lanes.
  const int group = __shfl_sync(~0u, warp / 4, 0);                         // of the role's two
  const int token_row = warp % 4 * 16, token_column = group * kSlice / 2;  // of the warp's tile of tokens
};

// Brings q, k and v as they lie in payloads.
template <typename Memory>
class PayloadLoader : protected ChunkRole<Memory> {
 protected:
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::begin, Base::count, Base::kKeys,
      Base::kSlice, Base::kStages;
  using Stage = typename Base::Stage;
  using Base::Base;

  // 64 rows, `row_bytes` apart.
  template <typename Tile>
  __device__ __forceinline__ void LoadTile(Tile& to, const void* from, int64_t row_bytes) const {
    LoadWhole<false>(to, from, row_bytes);
  }
  // Of a matrix of tokens by tokens, what is not above the diagonal's tiles of 16; zeros there.
  __device__ __forceinline__ void LoadTriangle(WideTile<kTokens>& to, const void* from) const {
    LoadWhole<true>(to, from, 2 * kTokens);
  }
  // The same, each sixteen bytes where `from(row, column)` says; null: zeros.
  template <typename Tile, typename From>
  __device__ __forceinline__ void LoadRows(Tile& to, From&& from) const {
    constexpr int kCount = Tile::kColumns / 8;
#pragma unroll 1
    for (int i = thread; i < kTokens * kCount; i += kLoaders) {
      const int row = i / kCount, column = i % kCount * 8;
      const std::byte* const source = from(row, column);
      CopyPayloadAsync(SharedAddress(to.data + Tile::At(row, column)), source != nullptr ? source : p.query,
                       source != nullptr);
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
      if (!this->Passes(i)) LoadTile(to.query, query, step);
      LoadTile(to.keys, key, step);
      return;
    }
    if (!this->Passes(i)) {
      LoadRows(to.query, [&](int row, int column) -> const std::byte* {
        const bool there = first_row + row >= 0 && first_row + row < rows;
        return there ? query + row * step + 2 * column : nullptr;
      });
    }
    LoadRows(to.keys,
             [&](int row, int column) { return OldOrNew(i, p.layout.keys, key + 2 * column, row, step, column); });
  }
  __device__ __forceinline__ void LoadValues(int i, Stage& to) const {
    const int first_row = this->FirstRow(i);
    const int64_t step = int64_t{2} * item.heads * p.value_dim;
    const std::byte* const value =
        p.key_value + item.value_offset + first_row * step + 2 * (head * p.value_dim + first_column);
    const bool whole = first_row >= 0 && first_row + kTokens <= item.rows && first_column + kSlice <= p.value_dim;
    if (whole && IsAligned(value)) return LoadTile(to.values, value, step);
    LoadRows(to.values, [&](int row, int column) -> const std::byte* {
      if (first_column + column >= p.value_dim) return nullptr;
      return OldOrNew(i, p.layout.values, value + 2 * column, row, step, first_column + column);
    });
  }

  const int thread = threadIdx.x % kLoaders;

 private:
  template <bool kTriangle, typename Tile>
  __device__ __forceinline__ void LoadWhole(Tile& to, const void* from, int64_t row_bytes) const {
    constexpr int kCount = Tile::kColumns / 8, kAtOnce = kLoaders / kCount;  // rows
    static_assert(kAtOnce % 8 == 0 && (!kTriangle || kAtOnce == 16));        // parts trade places alike
    const int row = thread / kCount, column = thread % kCount * 8;
    const std::byte* source = static_cast<const std::byte*>(from) + row * row_bytes + 2 * column;
    uint32_t place = SharedAddress(to.data + Tile::At(row, column));
#pragma unroll
    for (int i = 0; i < kTokens / kAtOnce; ++i) {
      CopyAsync(place, source, !kTriangle || column / 16 <= i);
      source += kAtOnce * row_bytes, place += kAtOnce * Tile::kRowBytes;
    }
  }
};

// Has S: 64 of its rows a warpgroup, and all columns or half of them.
template <typename Memory>
class ChunkState : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::begin, Base::count, Base::lane, Base::warp,
      Base::group, Base::kKeys, Base::kSlice, Base::kStages, Base::token_row, Base::token_column;
  using TokenTile = typename Base::TokenTile;
  using Stage = typename Base::Stage;
  static constexpr bool kVector = Memory::kVector, kDelta = Memory::kDelta;
  static constexpr bool kFadesTokens = kDelta && !kVector, kFadesValues = Memory::kFadesValues;
  static constexpr bool kHalves = kKeys == 64;                     // a warpgroup has half of the columns
  static constexpr int kStateTiles = kSlice / (kHalves ? 16 : 8);  // of 8 columns
  static constexpr int kTiles = kSlice / 16;  // of 8 columns: of tokens, a warp has 16 and half the slice

 public:
  using Base::Base;
  __device__ void Run() {
    WaitForStage(0);
    LoadState();
    const std::byte* entry = *this->BlockAt(0).entries;
    for (int i = 0; i < count; ++i) {
      kept = entry != nullptr && !this->Passes(i);
      if (i + 1 < count) entry = *this->BlockAt(i + 1).entries;
      Advance(i, s.stages[i % kStages]);
    }
    if (p.carry != nullptr && count == p.chunk_end - p.chunk_begin) StoreCarry();
  }

 private:
  __device__ __forceinline__ static void Sync() { asm volatile("bar.sync 1, %0;" ::"n"(kRole) : "memory"); }
  __device__ __forceinline__ void SyncGroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(kGroup) : "memory");
  }
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
    auto& to = s.state[i % 2];
    if (!this->Passes(i)) ForState([&](int row, int column, float x, float y) { StoreTwo(to, row, column, x, y); });
    FenceProducts();
    if (!kDelta && !this->Passes(i)) WarpArrive(s.ready[i % 2]);  // else u is what o waits for
    Sync();
  }
  template <typename Tile>
  __device__ __forceinline__ static void StoreTwo(Tile& to, int row, int column, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(to.data + Tile::At(row, column)) = __floats2bfloat162_rn(x, y);
  }
  __device__ __forceinline__ void StoreCarry() {
    ForState([&](int row, int column, float x, float y) {
      *reinterpret_cast<float2*>(Carry(row, column)) = make_float2(x, y);
    });
  }

  __device__ __forceinline__ void Advance(int i, const Stage& stage) {
    if constexpr (kDelta) Solve(i, stage);
    if (this->FirstRow(i) + kTokens > item.rows) return;  // the last one, not full
    AddTokens(stage, Added(i, stage));
    if (kFadesValues && i + 1 < count) WaitForStage(i + 1);  // has work to do meanwhile
    WaitForProducts();
    WarpArrive(s.empty[i % kStages]);  // first: of two stages the next one may be the only other
    if (this->Passes(i) && group == 0) WarpArrive(s.empty[i % kStages]);  // for those that have o
    if (!kFadesValues && i + 1 < count) WaitForStage(i + 1);
    // S of the chunk before last lay where the next one is to lie.
    if (i > begin) this->Wait(s.drained[(i + 1) % 2], (i - 1 - begin) / 2);
    ShareState(i + 1);
    if (kept) StoreState(this->BlockAt(i));
  }
  // Products may read it after ShareState, whose fence is behind it.
  __device__ __forceinline__ void WaitForStage(int i) {
    this->Wait(s.full[i % kStages], i / kStages);
    if constexpr (kFadesValues) FadeValues(i);
  }
  // What S adds, by keys.
  __device__ __forceinline__ const TokenTile& Added(int i, const Stage& stage) const {
    if constexpr (kFadesValues) {
      return s.faded[i % 2];
    } else if constexpr (kDelta) {
      return kFadesTokens ? s.faded[0] : s.u[i % 2];
    } else {
      return stage.values;
    }
  }

  // u, and where it is kept.
  __device__ __forceinline__ void Solve(int i, const Stage& stage) {
    float recalled[kTiles][4] = {};
    BeginProducts();
    if constexpr (Stage::kRecalls) {
      MultiplyTiles(recalled, stage.recall, s.state[i % 2], token_column);
    } else {
      MultiplyTiles(recalled, stage.keys, s.state[i % 2], token_column);
    }
    EndProducts();
    WaitForProducts();
    this->ForPairs(recalled, token_row, token_column, [&](int t, int column, float x, float y) {
      const float2 v =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values.data[TokenTile::At(t, column)]));
      const float factor = Stage::kRecalls ? 1.0f : stage.factors[kRecall * kTokens + t];
      StoreTwo(s.rest, t, column, v.x - factor * x, v.y - factor * y);
    });
    FenceProducts();
    SyncGroup();  // which has its columns of all tokens
    float u[kTiles][4] = {};
    BeginProducts();
    MultiplyTiles(u, stage.inverse, s.rest, token_column);
    EndProducts();
    WaitForProducts();
    this->ForPairs(u, token_row, token_column, [&](int t, int column, float x, float y) {
      StoreTwo(s.u[i % 2], t, column, x, y);
      if constexpr (kFadesTokens) {
        const float factor = stage.factors[kTo * kTokens + t];
        StoreTwo(s.faded[0], t, column, factor * x, factor * y);
      }
    });
    FenceProducts();
    WarpArrive(s.ready[i % 2]);
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
#pragma unroll
    for (int n = threadIdx.x; n < kTokens * kSlice / 8; n += kRole) {
      const int t = n / (kSlice / 8), c = n % (kSlice / 8) * 8;
      const float factor = stage.factors[kTo * kTokens + t];
      float v[8];
      LoadWire8(WireType::kBF16, stage.values.data, TokenTile::At(t, c), v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= factor;
      StoreWire8(WireType::kBF16, s.faded[i % 2].data, TokenTile::At(t, c), v);
    }
  }

  // Begins S = total S + keys^T added.
  __device__ __forceinline__ void AddTokens(const Stage& stage, const TokenTile& added) {
    const float* const total = stage.factors + kStateFactors * kTokens;
    const float low = total[state_row + lane / 4], high = total[state_row + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n)
      state[n][0] *= low, state[n][1] *= low, state[n][2] *= high, state[n][3] *= high;
    BeginProducts();
    MultiplyTurned(state, stage.keys, kHalves ? 0 : group, added, state_column);
    EndProducts();
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
  const int state_row = token_row + (kHalves ? 0 : 64 * group), state_column = kHalves ? token_column : 0;
  float state[kStateTiles][4];
};

// A thread block of a kernel that goes from chunk to chunk; all kChunkThreads call it. `Output` has o and `Loader`
// loads, with Loader::kArrivals arrivals a stage.
template <typename Memory, template <typename> class Output, template <typename> class Loader>
__device__ __forceinline__ void GoFromChunkToChunk(const StateLaunch& p) {
  static_assert(sizeof(Memory) <= 227 << 10, "shared memory of a thread block");
  extern __shared__ __align__(1024) std::byte memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const StateUnit unit = UnitOf(p, blockIdx.x / Slices(p, Memory::kSlice));
  const int chunks = ChunkRole<Memory>::Chunks(p, p.items[unit.item]), segments = gridDim.y;
  if (chunks <= 0) return;
  if (Memory::kShares && SegmentBegin(blockIdx.y, segments, chunks) == SegmentBegin(blockIdx.y + 1, segments, chunks))
    return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      BarrierInit(SharedAddress(&s.full[i]), Loader<Memory>::kArrivals);
      BarrierInit(SharedAddress(&s.empty[i]), (kRole + kGroup) / 32 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(SharedAddress(&s.ready[i]), kRole / 32 * kWarpArrivals);
      BarrierInit(SharedAddress(&s.drained[i]), kGroup / 32 * kWarpArrivals);
    }
  }
  __syncthreads();
  constexpr bool kWide = Memory::kSlice == 64;  // more sums: registers by need
  switch (threadIdx.x / kRole) {
    case 0:
      if constexpr (kWide) TakeRegisters<88, false>();
      return ChunkState<Memory>(p, s, unit).Run();
    case 1:
      if constexpr (kWide) TakeRegisters<120, true>();
      return Output<Memory>(p, s, unit).Run();
    default:
      if constexpr (kWide) TakeRegisters<56, false>();
      return Loader<Memory>(p, s, unit).Run();
  }
}

}  // namespace dovetail::kernels::cuda
