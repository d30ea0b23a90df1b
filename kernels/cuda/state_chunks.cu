#include "kernels/cuda/state_chunk_roles.cuh"
#include "kernels/cuda/state_launches.h"

// The second kernel of the chunked form: chunk after chunk, a thread block a head and 32 value columns.
//   u = inverse (v - recall S)   (or v times its rate)     o = query S + weights u     S = total S + keys^T u

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 2 * kRole + kLoaders;

template <int kKeys, bool kVector, bool kDelta>
struct ChunkStage {
  static constexpr bool kRecalls = kVector && kDelta;  // with decays that keys do not have
  static constexpr int kWide = kKeys + 8;
  alignas(16) __nv_bfloat16 query[kTokens * kWide], keys[kTokens * kWide], recall[kRecalls ? kTokens * kWide : 8];
  alignas(16) __nv_bfloat16 weights[kTokens * kNarrow], inverse[kDelta ? kTokens * kNarrow : 8];
  alignas(16) __nv_bfloat16 values[kTokens * kThin];
  alignas(16) float factors[kStateFactors * kTokens + kKeys];  // and the block's decays
};

template <int kOfKeys, bool kOfVector, bool kOfDelta>
struct ChunkShared {
  static constexpr int kKeys = kOfKeys;
  static constexpr bool kVector = kOfVector, kDelta = kOfDelta, kFadesValues = false;
  static constexpr int kStages = kDelta && kVector ? 2 : 3;
  using Stage = ChunkStage<kKeys, kVector, kDelta>;
  Stage stages[kStages];
  alignas(16) __nv_bfloat16 state[2][kKeys * kThin];
  alignas(16) __nv_bfloat16 u[kDelta ? 2 : 1][kDelta ? kTokens * kThin : 8];
  alignas(16) __nv_bfloat16 faded[1][kDelta && !kVector ? kTokens * kThin : 8];
  alignas(16) __nv_bfloat16 rest[kDelta ? kTokens * kThin : 8];  // v - recall S
  uint64_t full[kStages], empty[kStages];
  uint64_t ready[2], drained[2];
};

// Loads chunks, as far ahead as there are stages.
template <typename Memory>
class ChunkLoader : PayloadLoader<Memory> {
  using Base = PayloadLoader<Memory>;
  using Base::p, Base::s, Base::first_column, Base::count, Base::kKeys, Base::kStages, Base::thread;
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
  __device__ __forceinline__ void Load(int i, Stage& to) const {
    const ChunkSpace<kKeys> space(p, this->unit, p.chunk_begin + i);
    if (StateChunksAreDirect(p)) {
      this->LoadHeads(i, to);
    } else {
      this->template LoadTile<kKeys / 8>(to.query, Stage::kWide, space.query, 2 * kKeys);
      this->template LoadTile<kKeys / 8>(to.keys, Stage::kWide, space.keys, 2 * kKeys);
      if constexpr (Stage::kRecalls)
        this->template LoadTile<kKeys / 8>(to.recall, Stage::kWide, space.recall, 2 * kKeys);
    }
    if (StateValuesAreDirect(p)) {
      this->LoadValues(i, to);
    } else {
      this->template LoadTile<kSlice / 8>(to.values, kThin, space.values + first_column,
                                          2 * StateChunkValues(p.value_dim));
    }
    this->template LoadTile<kTokens / 8>(to.weights, kNarrow, space.weights, 2 * kTokens);
    if constexpr (Memory::kDelta) this->template LoadTile<kTokens / 8>(to.inverse, kNarrow, space.inverse, 2 * kTokens);
    if (thread < (kStateFactors * kTokens + kKeys) / 4)
      CopyAsync(SharedAddress(to.factors + 4 * thread), space.factors + 4 * thread);
  }
};

// Has o: 16 tokens and half the columns a warp.
template <typename Memory>
class ChunkOutput : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::first_column, Base::count, Base::lane, Base::kKeys,
      Base::kWide, Base::kStages, Base::token_row, Base::token_column;
  using Stage = typename Base::Stage;
  static constexpr bool kVector = Memory::kVector, kDelta = Memory::kDelta;

 public:
  using Base::Base;
  __device__ void Run() {
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    for (int i = 0; i < count; ++i) {
      const Stage& stage = s.stages[i % kStages];
      BarrierWait(SharedAddress(&s.full[i % kStages]), i / kStages % 2);
      float sums[kTiles][4] = {};
      Multiply(i, stage, sums);
      if (skip != 0) this->Skip(stage, skip, token_row, token_column, sums);
      this->Arrive(s.empty[i % kStages]);
      this->StoreOutput(this->FirstRow(i), token_row, token_column, sums);
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
    case 0: return ChunkState<Memory>(p, s, unit).Run();
    case 1: return ChunkOutput<Memory>(p, s, unit).Run();
    default: return ChunkLoader<Memory>(p, s, unit).Run();
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
  if (StateChunksAreFused(*p)) return LaunchStateChunksDirect(p, stream);
  auto* const on = static_cast<cudaStream_t>(stream);
  return p->key_dim <= 64 ? LaunchFor<64>(*p, on) : LaunchFor<128>(*p, on);
}

}  // namespace dovetail::kernels::cuda
