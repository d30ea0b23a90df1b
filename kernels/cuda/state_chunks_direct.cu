#include "kernels/cuda/state_chunk_roles.cuh"
#include "kernels/cuda/state_launches.h"

// The chunked form in one kernel, for states that only add, one decay a token, and inputs that products take as they
// come (StateChunksAreFused): chunk after chunk, a thread block a head and 32 value columns.
//   o = decay query S + (query keys^T where not later, faded, times rates) values     S = total S + keys^T values
// Two times four warps have o, of every other chunk each: they weigh tokens before they wait for S.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 2 * kRole + kLoaders, kOutputs = kRole / 2;
constexpr int kSums = kRecall;  // among factors: nothing is recalled

template <int kKeys>
struct DirectStage {
  static constexpr int kWide = kKeys + 8;
  alignas(16) __nv_bfloat16 query[kTokens * kWide], keys[kTokens * kWide];
  alignas(16) __nv_bfloat16 values[kTokens * kThin];
  alignas(16) float factors[kStateFactors * kTokens + kKeys];  // kSums: logarithms, base 2; and the block's decay
  alignas(16) float rate[kTokens];                             // times that of q
  float log[kTokens], own_rate[kTokens];                       // as they came
};

template <int kOfKeys>
struct DirectShared {
  static constexpr int kKeys = kOfKeys, kStages = 4;
  static constexpr bool kVector = false, kDelta = false, kFadesValues = true;
  using Stage = DirectStage<kKeys>;
  Stage stages[kStages];
  alignas(16) __nv_bfloat16 state[2][kKeys * kThin];
  alignas(16) __nv_bfloat16 faded[2][kTokens * kThin];
  __nv_bfloat16 u[2][8], rest[8];
  uint64_t full[kStages], empty[kStages];
  uint64_t ready[2], drained[2];
};

// Loads chunks, and has one warp make factors of decays and rates, which come a chunk ahead.
template <typename Memory>
class DirectLoader : PayloadLoader<Memory> {
  using Base = PayloadLoader<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::count, Base::kKeys, Base::kStages, Base::thread;
  using Stage = typename Base::Stage;

 public:
  using Base::Base;
  static constexpr int kArrivals = kLoaders + 1;
  __device__ void Run() {
    const bool gates = thread < 32;
    Gate low, high;
    if (gates) low = GateOf(0, thread), high = GateOf(0, thread + 32);
    for (int i = 0; i < count; ++i) {
      const int stage = i % kStages;
      const uint32_t full = SharedAddress(&s.full[stage]);
      BarrierWait(SharedAddress(&s.empty[stage]), (i / kStages + 1) % 2);
      this->LoadHeads(i, s.stages[stage]);
      this->LoadValues(i, s.stages[stage]);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
      if (!gates) continue;
      const Gate now_low = low, now_high = high;
      if (i + 1 < count) low = GateOf(i + 1, thread), high = GateOf(i + 1, thread + 32);
      StoreFactors(s.stages[stage], now_low, now_high);
      this->Arrive(s.full[stage]);
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
    constexpr float kLog2E = 1.4426950408889634f;
    __syncwarp();
    first.log = fmaxf(first.log, kLowestLogDecay), second.log = fmaxf(second.log, kLowestLogDecay);
    float low = first.log, high = second.log;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more_low = __shfl_up_sync(~0u, low, step), more_high = __shfl_up_sync(~0u, high, step);
      if (thread >= step) low += more_low, high += more_high;
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
    store(thread, first, low);
    store(thread + 32, second, high);
#pragma unroll
    for (int c = thread; c < kKeys; c += 32) to.factors[kStateFactors * kTokens + c] = total;
  }

  const float own_decay = p.token_decay ? 0 : p.log_decay[item.first_head + head];
};

// Has o of every other chunk: 16 tokens a warp.
template <typename Memory>
class DirectOutput : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::lane, Base::kKeys,
      Base::kWide, Base::kStages;
  using Stage = typename Base::Stage;
  static constexpr int kAll = kSlice / 8;  // tiles of columns
  static constexpr float kNever = -1e30f;  // whose power is 0

 public:
  using Base::Base;
  __device__ void Run() {
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    for (int i = group; i < count; i += 2) {
      const Stage& stage = s.stages[i % kStages];
      const bool kept = *this->BlockAt(i).entries != nullptr;
      BarrierWait(SharedAddress(&s.full[i % kStages]), i / kStages % 2);
      __syncwarp();
      uint32_t weights[4][4];
      Weigh(stage, weights);
      BarrierWait(SharedAddress(&s.ready[group]), i / 2 % 2);
      __syncwarp();
      float sums[kAll][4] = {};
      Multiply(stage, s.state[group], weights, sums);
      if (skip != 0) this->Skip(stage, skip, row, 0, sums);
      if (kept) Keep(i, stage);
      this->Arrive(s.empty[i % kStages]);
      this->StoreOutput(this->FirstRow(i), row, 0, sums);
    }
  }

 private:
  // What the warp's tokens weigh tokens up to themselves with: operands of the product with values. Loops stay loops:
  // the code of all roles has to fit into the instruction cache.
  __device__ __forceinline__ void Weigh(const Stage& stage, uint32_t (&weights)[4][4]) const {
    float x[8][4] = {};
    uint32_t a_at = AddressA(SharedAddress(stage.query), kWide, row, 0);
    uint32_t b_at = AddressB(SharedAddress(stage.keys), kWide, 0, 0);
#pragma unroll 2
    for (int c = 0; c < kKeys; c += 16, a_at += 32, b_at += 32) {
      uint32_t a[4], b[4][4];
      LoadMatrices(a, a_at);
#pragma unroll
      for (int n = 0; n < 4; ++n) LoadMatrices(b[n], b_at + 32 * kWide * n);  // also those that are not used: no waits
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (16 * n > row) continue;
        BF16Math::Mma(x[2 * n], a, b[n][0], b[n][1]);
        BF16Math::Mma(x[2 * n + 1], a, b[n][2], b[n][3]);
      }
    }
    const float* const sums = stage.factors + kSums * kTokens;
    const int t = row + lane / 4;
    const float of_low = sums[t], of_high = sums[t + 8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (8 * n > row + 8) break;
      const int j = 8 * n + lane % 4 * 2;
      const float2 sum = *reinterpret_cast<const float2*>(sums + j);
      const float2 rate = *reinterpret_cast<const float2*>(stage.rate + j);
      const auto pair = [&](int at, float of, float a, float b) {
        return BF16Math::Pack(rate.x * a * Exp2(j <= at ? of - sum.x : kNever),
                              rate.y * b * Exp2(j + 1 <= at ? of - sum.y : kNever));
      };
      weights[n / 2][n % 2 * 2] = pair(t, of_low, x[n][0], x[n][1]);
      weights[n / 2][n % 2 * 2 + 1] = pair(t + 8, of_high, x[n][2], x[n][3]);
    }
  }

  __device__ __forceinline__ void Multiply(const Stage& stage, const __nv_bfloat16* state,
                                           const uint32_t (&weights)[4][4], float (&sums)[kAll][4]) const {
#pragma unroll 4
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t query[4];
      LoadA(query, SharedAddress(stage.query), kWide, row, k);
      this->MultiplyStep(sums, query, SharedAddress(state), k, 0);
    }
    this->Arrive(s.drained[group]);
    const float low = stage.factors[kFrom * kTokens + row + lane / 4];
    const float high = stage.factors[kFrom * kTokens + row + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kAll; ++n) sums[n][0] *= low, sums[n][1] *= low, sums[n][2] *= high, sums[n][3] *= high;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (16 * k <= row) this->MultiplyStep(sums, weights[k], SharedAddress(stage.values), 16 * k, 0);
  }

  // What the block keeps of its new tokens.
  __device__ __forceinline__ void Keep(int i, const Stage& stage) const {
    const StateBlock block = this->BlockAt(i);
    const int first_row = this->FirstRow(i), thread = threadIdx.x % kOutputs;
    const auto fresh = [&](int t) { return first_row + t >= 0 && first_row + t < item.rows; };
    for (int n = thread; n < kTokens * kSlice / 8; n += kOutputs) {
      const int t = n / (kSlice / 8), c = n % (kSlice / 8) * 8;
      if (!fresh(t) || first_column + c >= p.value_dim) continue;
      float v[8];
      LoadWire8(WireType::kBF16, stage.values, t * kThin + c, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= stage.own_rate[t];
      StoreWire8(WireType::kBF16, block.Row(p.layout.values, t), first_column + c, v);
    }
    if (first_column > 0) return;  // keys and decays: one slice
    for (int n = thread; n < kTokens * kKeys / 8; n += kOutputs) {
      const int t = n / (kKeys / 8), c = n % (kKeys / 8) * 8;
      if (fresh(t))
        *reinterpret_cast<uint4*>(block.Row(p.layout.keys, t) + 2 * c) =
            *reinterpret_cast<const uint4*>(stage.keys + t * kWide + c);
    }
    if (thread < kTokens && fresh(thread))
      reinterpret_cast<float*>(block.Row(p.layout.decays, 0))[thread] = stage.log[thread];
  }

  const int role_warp = __shfl_sync(~0u, threadIdx.x / 32 % (kRole / 32), 0);  // known to be the same for all lanes
  const int group = role_warp / 4;
  // Rows that weigh many tokens and rows that weigh few share a scheduler.
  const int row = (group == 0 ? role_warp % 4 : 3 - role_warp % 4) * 16;
};

template <int kKeys>
__global__ void __launch_bounds__(kThreads, 1) StateChunksDirectKernel(const __grid_constant__ StateLaunch p) {
  using Memory = DirectShared<kKeys>;
  extern __shared__ __align__(16) std::byte memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const StateUnit unit = UnitOf(p, blockIdx.x / Slices(p));
  if (p.chunk_begin >= ChunksOf(p.items[unit.item])) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      BarrierInit(SharedAddress(&s.full[i]), DirectLoader<Memory>::kArrivals);
      BarrierInit(SharedAddress(&s.empty[i]), (kRole + kOutputs) / 32);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(SharedAddress(&s.ready[i]), kRole / 32);
      BarrierInit(SharedAddress(&s.drained[i]), kOutputs / 32);
    }
  }
  __syncthreads();
  switch (threadIdx.x / kRole) {
    case 0: return ChunkState<Memory>(p, s, unit).Run();
    case 1: return DirectOutput<Memory>(p, s, unit).Run();
    default: return DirectLoader<Memory>(p, s, unit).Run();
  }
}

template <int kKeys>
int Launch(const StateLaunch& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(DirectShared<kKeys>);
  auto* const kernel = StateChunksDirectKernel<kKeys>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.unit_count * Slices(p), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int LaunchStateChunksDirect(const StateLaunch* p, void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  return p->key_dim <= 64 ? Launch<64>(*p, on) : Launch<128>(*p, on);
}

}  // namespace dovetail::kernels::cuda
