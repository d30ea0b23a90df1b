#include <type_traits>

#include "kernels/cuda/state/state_chunk_roles.cuh"
#include "kernels/cuda/state/state_launch.cuh"
#include "kernels/cuda/state/state_launches.h"

// The second kernel of the chunked form: chunk after chunk, a thread block a head and 32 value columns.
//   u = inverse (v - recall S)   (or v times its rate)     o = query S + weights u     S = total S + keys^T u

namespace dovetail::kernels::cuda {
namespace {

constexpr int kSlice = kStateSlice;
using TokenTile = ThinTile<kTokens, kSlice>;

template <int kKeys>
struct RecallTile {
  static constexpr bool kRecalls = true;
  WideTile<kKeys> recall;
};
struct NoRecallTile {
  static constexpr bool kRecalls = false;
};

// Recalls by keys with decays that keys do not have.
template <int kKeys, bool kVector, bool kDelta>
struct ChunkStage : std::conditional_t<kVector && kDelta, RecallTile<kKeys>, NoRecallTile> {
  WideTile<kKeys> query, keys;
  WideTile<kTokens> weights, inverse;
  TokenTile values;
  alignas(16) float factors[kStateFactors * kTokens + kKeys];  // and the block's decays
};

template <int kOfKeys, bool kOfVector, bool kOfDelta>
struct ChunkShared {
  static constexpr int kKeys = kOfKeys, kSlice = kStateSlice;
  static constexpr bool kVector = kOfVector, kDelta = kOfDelta, kShares = false, kFadesValues = !kVector && !kDelta;
  static constexpr int kStages = kDelta && kVector ? 2 : 3;
  using Stage = ChunkStage<kKeys, kVector, kDelta>;
  Stage stages[kStages];
  ThinTile<kKeys, kSlice> state[2];
  TokenTile u[kDelta ? 2 : 1], faded[2], rest;  // rest: v - recall S
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
  static constexpr int kArrivals = kLoaders;
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
      this->LoadTile(to.query, space.query, 2 * kKeys);
      this->LoadTile(to.keys, space.keys, 2 * kKeys);
      if constexpr (Stage::kRecalls) this->LoadTile(to.recall, space.recall, 2 * kKeys);
    }
    if (StateValuesAreDirect(p)) {
      this->LoadValues(i, to);
    } else {
      this->LoadTile(to.values, space.values + first_column, 2 * StateChunkValues(p.value_dim));
    }
    this->LoadTriangle(to.weights, space.weights);
    if constexpr (Memory::kDelta) this->LoadTriangle(to.inverse, space.inverse);
    if (thread < (kStateFactors * kTokens + kKeys) / 4)
      CopyAsync(SharedAddress(to.factors + 4 * thread), space.factors + 4 * thread);
  }
};

// Has o of every other chunk: 16 tokens a warp.
template <typename Memory>
class ChunkOutput : ChunkRole<Memory> {
  using Base = ChunkRole<Memory>;
  using Base::p, Base::s, Base::item, Base::head, Base::count, Base::lane, Base::group, Base::kStages, Base::token_row;
  using Stage = typename Base::Stage;

 public:
  using Base::Base;
  __device__ void Run() {
    const float skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
    for (int i = group; i < count; i += 2) {
      const Stage& stage = s.stages[i % kStages];
      this->Wait(s.full[i % kStages], i / kStages);
      this->Wait(s.ready[group], i / 2);
      FenceProducts();
      float sums[kSlice / 8][4] = {};
      Multiply(stage, sums);
      WarpArrive(s.drained[group]);
      if (skip != 0) this->Skip(stage, skip, token_row, 0, sums);
      WarpArrive(s.empty[i % kStages]);
      this->StoreOutput(this->FirstRow(i), sums);
    }
  }

 private:
  __device__ __forceinline__ void Multiply(const Stage& stage, float (&sums)[kSlice / 8][4]) const {
    BeginProducts();
    MultiplyTiles(sums, stage.query, s.state[group], 0);
    EndProducts();
    if constexpr (!Memory::kVector) {
      WaitForProducts();
      const float low = stage.factors[kFrom * kTokens + token_row + lane / 4];
      const float high = stage.factors[kFrom * kTokens + token_row + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < kSlice / 8; ++n) sums[n][0] *= low, sums[n][1] *= low, sums[n][2] *= high, sums[n][3] *= high;
      BeginProducts();
    }
    if constexpr (Memory::kDelta) {
      MultiplyTiles(sums, stage.weights, s.u[group], 0);
    } else {
      MultiplyTiles(sums, stage.weights, stage.values, 0);
    }
    EndProducts();
    WaitForProducts();
  }
};

template <int kKeys, bool kVector, bool kDelta>
__global__ void __launch_bounds__(kChunkThreads, 1) StateChunksKernel(const __grid_constant__ StateLaunch p) {
  GoFromChunkToChunk<ChunkShared<kKeys, kVector, kDelta>, ChunkOutput, ChunkLoader>(p);
}

template <int kKeys, bool kVector, bool kDelta>
int Launch(const StateLaunch& p, void* stream) {
  return LaunchStateKernel(StateChunksKernel<kKeys, kVector, kDelta>, p.unit_count * Slices(p, kSlice), kChunkThreads,
                           sizeof(ChunkShared<kKeys, kVector, kDelta>), p, stream);
}

template <int kKeys>
int LaunchFor(const StateLaunch& p, void* stream) {
  if (p.vector_decay) return p.delta ? Launch<kKeys, true, true>(p, stream) : Launch<kKeys, true, false>(p, stream);
  return p.delta ? Launch<kKeys, false, true>(p, stream) : Launch<kKeys, false, false>(p, stream);
}

}  // namespace

int LaunchStateChunks(const StateLaunch* p, void* stream) {
  if (StateChunksAreFused(*p)) return LaunchStateChunksDirect(p, stream);
  return p->key_dim <= 64 ? LaunchFor<64>(*p, stream) : LaunchFor<128>(*p, stream);
}

}  // namespace dovetail::kernels::cuda
