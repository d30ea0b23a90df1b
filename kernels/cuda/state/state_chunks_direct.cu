#include <algorithm>

#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/state/state_chunk_roles.cuh"
#include "kernels/cuda/state/state_launch.cuh"
#include "kernels/cuda/state/state_launches.h"

// The chunked form in one kernel, for states that only add, one decay a token, and inputs that products take as they
// come (StateChunksAreFused): chunk after chunk, a thread block a head and 64 value columns, or 32.
//   o = decay query S + (query keys^T where not later, faded, times rates) values     S = total S + keys^T values
// Warps that have o weigh tokens, and their values, before they wait for S. Up to four thread blocks share a slice.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kSums = kRecall;  // among factors: nothing is recalled

template <int kKeys, int kSlice>
struct DirectStage {
  WideTile<kKeys> query, keys;
  ThinTile<kTokens, kSlice> values;
  alignas(16) float factors[kStateFactors * kTokens + kKeys];  // kSums: logarithms, base 2; and the block's decay
  alignas(16) float rate[kTokens];                             // times that of q
  float log[kTokens], own_rate[kTokens];                       // as they came
};

template <int kOfKeys, int kOfSlice>
struct DirectShared {
  static constexpr int kKeys = kOfKeys, kSlice = kOfSlice, kStages = kSlice == 64 ? 4 : 5;
  static constexpr bool kVector = false, kDelta = false, kShares = true, kFadesValues = true;
  using Stage = DirectStage<kKeys, kSlice>;
  Stage stages[kStages];
  ThinTile<kKeys, kSlice> state[2];
  ThinTile<kTokens, kSlice> faded[2];
  uint64_t full[kStages], empty[kStages];
  uint64_t ready[2], drained[2];
};

// Loads chunks, and has its warps in turn make factors of decays and rates, which come a round ahead: one warp alone
// would be what all others wait for.
template <typename Memory>
class DirectLoader : PayloadLoader<Memory> {
  using Base = PayloadLoader<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::count, Base::lane, Base::kKeys, Base::kStages, Base::thread;
  using Stage = typename Base::Stage;

 public:
  using Base::Base;
  static constexpr int kWarps = kLoaders / 32, kArrivals = kLoaders + kWarpArrivals;
  __device__ void Run() {
    const int turn = thread / 32;
    Gate low, high;
    if (turn < count) low = GateOf(turn, lane), high = GateOf(turn, lane + 32);
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      const uint32_t full = SharedAddress(&s.full[stage]);
      BarrierWait(SharedAddress(&s.empty[stage]), (i / kStages + 1) % 2);
      this->LoadHeads(i, s.stages[stage]);
      this->LoadValues(i, s.stages[stage]);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
      if (i % kWarps != turn) continue;
      StoreFactors(s.stages[stage], low, high);
      WarpArrive(s.full[stage]);
      if (i + kWarps < count) low = GateOf(i + kWarps, lane), high = GateOf(i + kWarps, lane + 32);
    }
  }

 private:
  struct Gate {
    float log = 0, rate = 0;
  };
  __device__ __forceinline__ Gate GateOf(int i, int t) const {
    const int row = this->FirstRow(i) + t;
    if (row < 0) return {reinterpret_cast<const float*>(this->BlockAt(i).Row(p.layout.decays, 0))[t], 1};
    if (row >= item.rows) return {};
    const float* const gates = GatesOf(p, item, head, row);
    return {p.token_decay ? gates[0] : own_decay, p.token_rate ? gates[p.token_decay ? 1 : 0] : 1.0f};
  }
  __device__ __forceinline__ void StoreFactors(Stage& to, Gate first, Gate second) const {
    __syncwarp();
    first.log = fmaxf(first.log, kLowestLogDecay), second.log = fmaxf(second.log, kLowestLogDecay);
    float low = first.log, high = second.log;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more_low = __shfl_up_sync(~0u, low, step), more_high = __shfl_up_sync(~0u, high, step);
      if (lane >= step) low += more_low, high += more_high;
    }
    high += __shfl_sync(~0u, low, 31);
    const float all = __shfl_sync(~0u, high, 31), total = __expf(all);
    const auto store = [&](int t, const Gate& gate, float sum) {
      to.log[t] = gate.log;
      to.own_rate[t] = gate.rate;
      to.rate[t] = gate.rate * p.query_scale;
      to.factors[kFrom * kTokens + t] = __expf(sum) * p.query_scale;
      to.factors[kSums * kTokens + t] = sum * kLog2E;
      to.factors[kTo * kTokens + t] = __expf(all - sum) * gate.rate;
    };
    store(lane, first, low);
    store(lane + 32, second, high);
#pragma unroll
    for (int c = lane; c < kKeys; c += 32) to.factors[kStateFactors * kTokens + c] = total;
  }

  const float own_decay = p.token_decay ? 0 : p.log_decay[item.first_head + head];
};

// Has o of every other chunk: 16 tokens a warp.
template <typename Memory>
class DirectOutput : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::begin, Base::count, Base::lane, Base::group,
      Base::kKeys, Base::kSlice, Base::kStages, Base::token_row;
  using Stage = typename Base::Stage;
  using TokenTile = typename Base::TokenTile;
  static constexpr int kAll = kSlice / 8;  // tiles of columns
  static constexpr float kNever = -1e30f;  // whose power is 0

 public:
  using Base::Base;
  __device__ void Run() {
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    const int first = begin + group;
    const std::byte* entry = first < count ? *this->BlockAt(first).entries : nullptr;
    if (begin > 0 && first < count) this->Wait(s.ready[group], 0);  // stages before it are not waited for
    for (int i = first; i < count; i += 2) {
      const Stage& stage = s.stages[i % kStages];
      const bool kept = entry != nullptr;
      if (i + 2 < count) entry = *this->BlockAt(i + 2).entries;
      this->Wait(s.full[i % kStages], i / kStages);
      FenceProducts();
      float sums[kAll][4] = {};
      Multiply(i, stage, sums);
      if (skip != 0) this->Skip(stage, skip, token_row, 0, sums);
      if (kept) Keep(i, stage);
      WarpArrive(s.empty[i % kStages]);
      this->StoreOutput(this->FirstRow(i), sums);
    }
  }

 private:
  // What the warp's tokens weigh tokens up to themselves with: operands of the product with values.
  __device__ __forceinline__ void Weigh(const Stage& stage, uint32_t (&weights)[4][4]) const {
    float x[8][4] = {};
    BeginProducts();
    MultiplyRows(x, stage.query, stage.keys);
    EndProducts();
    WaitForProducts();
    const float* const sums = stage.factors + kSums * kTokens;
    const int t = token_row + lane / 4;
    const float of_low = sums[t], of_high = sums[t + 8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      uint32_t &low = weights[n / 2][n % 2 * 2], &high = weights[n / 2][n % 2 * 2 + 1];
      low = high = 0;
      if (8 * n > token_row + 8) continue;
      const int j = 8 * n + lane % 4 * 2;
      const float2 sum = *reinterpret_cast<const float2*>(sums + j);
      const float2 rate = *reinterpret_cast<const float2*>(stage.rate + j);
      const auto pair = [&](int at, float of, float a, float b) {
        return BF16Math::Pack(rate.x * a * Exp2(j <= at ? of - sum.x : kNever),
                              rate.y * b * Exp2(j + 1 <= at ? of - sum.y : kNever));
      };
      low = pair(t, of_low, x[n][0], x[n][1]);
      high = pair(t + 8, of_high, x[n][2], x[n][3]);
    }
  }

  __device__ __forceinline__ void Multiply(int i, const Stage& stage, float (&sums)[kAll][4]) const {
    uint32_t weights[4][4];
    Weigh(stage, weights);
    float by_state[kAll][4] = {};
    BeginProducts();
    MultiplyRegisters(sums, weights, stage.values);
    EndProducts();
    this->Wait(s.ready[group], (i - begin) / 2);
    BeginProducts();
    MultiplyTiles(by_state, stage.query, s.state[group], 0);
    EndProducts();
    WaitForProducts();
    WarpArrive(s.drained[group]);
    const float low = stage.factors[kFrom * kTokens + token_row + lane / 4];
    const float high = stage.factors[kFrom * kTokens + token_row + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kAll; ++n) {
      sums[n][0] += by_state[n][0] * low, sums[n][1] += by_state[n][1] * low;
      sums[n][2] += by_state[n][2] * high, sums[n][3] += by_state[n][3] * high;
    }
  }

  // What the block keeps of its new tokens.
  __device__ __forceinline__ void Keep(int i, const Stage& stage) const {
    const StateBlock block = this->BlockAt(i);
    const int first_row = this->FirstRow(i), thread = threadIdx.x % kGroup;
    const auto fresh = [&](int t) { return first_row + t >= 0 && first_row + t < item.rows; };
    for (int n = thread; n < kTokens * kSlice / 8; n += kGroup) {
      const int t = n / (kSlice / 8), c = n % (kSlice / 8) * 8;
      if (!fresh(t) || first_column + c >= p.value_dim) continue;
      float v[8];
      LoadWire8(WireType::kBF16, stage.values.data, TokenTile::At(t, c), v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= stage.own_rate[t];
      StoreWire8(WireType::kBF16, block.Row(p.layout.values, t), first_column + c, v);
    }
    if (thread < kSlice / kStateSlice && first_column + thread * kStateSlice < p.value_dim)
      ForgetMidway(p, block, first_column + thread * kStateSlice);
    if (first_column > 0) return;  // keys and decays: one slice
    for (int n = thread; n < kTokens * kKeys / 8; n += kGroup) {
      const int t = n / (kKeys / 8), c = n % (kKeys / 8) * 8;
      if (fresh(t))
        *reinterpret_cast<uint4*>(block.Row(p.layout.keys, t) + 2 * c) =
            *reinterpret_cast<const uint4*>(stage.keys.data + WideTile<kKeys>::At(t, c));
    }
    if (thread < kTokens && fresh(thread))
      reinterpret_cast<float*>(block.Row(p.layout.decays, 0))[thread] = stage.log[thread];
  }
};

template <int kKeys, int kSlice>
__global__ void __launch_bounds__(kChunkThreads, 1) StateChunksDirectKernel(const __grid_constant__ StateLaunch p) {
  GoFromChunkToChunk<DirectShared<kKeys, kSlice>, DirectOutput, DirectLoader>(p);
}

template <int kKeys, int kSlice>
int Launch(const StateLaunch& p, void* stream) {
  constexpr int kMostSegments = 4, kFewChunks = 4;
  int multiprocessors = 0;
  if (const int error = CountMultiprocessors(multiprocessors); error != 0) return error;
  const int blocks = p.unit_count * Slices(p, kSlice);
  const int segments = p.chunk_end < kFewChunks ? 1 : std::clamp(multiprocessors / blocks, 1, kMostSegments);
  return LaunchStateKernel(StateChunksDirectKernel<kKeys, kSlice>, dim3(blocks, segments), kChunkThreads,
                           sizeof(DirectShared<kKeys, kSlice>), p, stream);
}

template <int kKeys>
int LaunchKeys(const StateLaunch& p, void* stream) {
  return p.value_dim % 64 == 0 ? Launch<kKeys, 64>(p, stream) : Launch<kKeys, 32>(p, stream);
}

}  // namespace

int LaunchStateChunksDirect(const StateLaunch* p, void* stream) {
  return p->key_dim <= 64 ? LaunchKeys<64>(*p, stream) : LaunchKeys<128>(*p, stream);
}

}  // namespace dovetail::kernels::cuda
