#include "kernels/cuda/state/state_chunk_inputs.cuh"
#include "kernels/cuda/state/state_chunk_inverse.cuh"
#include "kernels/cuda/state/state_launches.h"

// The first kernel of the chunked form for one decay a token: all that does not depend on S, one thread block a chunk
// of 64 tokens and head. Tokens of the block from before the item come from it, with their u in place of v and a row of
// the identity in the delta rule's system.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kPrepareThreads = 128;

template <int kKeys, bool kDelta>
class Preparer : ChunkInputs<kKeys, false, kDelta, kPrepareThreads> {
  using Base = ChunkInputs<kKeys, false, kDelta, kPrepareThreads>;
  using Base::p, Base::in, Base::item, Base::head, Base::space, Base::block, Base::first_row, Base::kept, Base::direct,
      Base::lane, Base::warp, Base::kTokens, Base::kRow;

 public:
  static constexpr int kThreads = kPrepareThreads, kTogether = 1;
  struct Shared {
    ChunkRows<kKeys> rows;
    alignas(16) float decay[kTokens];                          // logarithms, summed from the block's beginning
    alignas(16) float system[kDelta ? kTokens * kSystem : 4];  // beta A, strictly below the diagonal
  };

  __device__ Preparer(const StateLaunch& launch, Shared& shared, const StateUnit& unit, int chunk)
      : Base(launch, shared.rows, unit, chunk), s(shared) {
    if (direct) weight_scale = p.query_scale;
  }

  __device__ void Run() {
    const bool wide = p.key_dim % 8 == 0 && p.value_dim % 8 == 0;
    if (direct && !kept) {
      this->CopyHeads();
    } else if (wide) {
      this->LoadHeads();
    }
    if (threadIdx.x < kTokens) {
      this->LoadRate(threadIdx.x);
      LoadDecay(threadIdx.x);
    }
    if (direct && !kept) {
      asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
      __syncthreads();
      if (wide) this->LoadWideValues();
      for (int t = warp; !wide && t < kTokens; t += kPrepareThreads / 32) this->LoadToken(t);
    }
    __syncthreads();
    SumDecays();
    __syncthreads();
    StoreFactors();
    if (!direct) StoreHeads();
    Multiply();
    if constexpr (!kDelta) return;
    __syncthreads();
    BlockInverse inverse(s.system);
    inverse.Run();
    inverse.Store<kPrepareThreads>(in.rate, space.inverse);
  }

 private:
  __device__ __forceinline__ void LoadDecay(int t) {
    auto* const decays = kept ? reinterpret_cast<float*>(block.Row(p.layout.decays, 0)) : nullptr;
    const int row = first_row + t;
    float log = 0;
    if (row < 0) log = decays[t];
    if (this->IsNew(t))
      log =
          fmaxf(p.token_decay ? GatesOf(p, item, head, row)[0] : p.log_decay[item.first_head + head], kLowestLogDecay);
    if (this->IsNew(t) && kept) decays[t] = log;
    s.decay[t] = log;
  }
  // Scalar decays, summed from the block's beginning.
  __device__ __forceinline__ void SumDecays() {
    if (warp != 0) return;
    float low = s.decay[lane], high = s.decay[lane + 32];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more_low = __shfl_up_sync(~0u, low, step), more_high = __shfl_up_sync(~0u, high, step);
      if (lane >= step) low += more_low, high += more_high;
    }
    high += __shfl_sync(~0u, low, 31);
    s.decay[lane] = low;
    s.decay[lane + 32] = high;
  }
  __device__ __forceinline__ void StoreFactors() {
    const int t = threadIdx.x;
    if (t < kKeys) space.total[t] = __expf(s.decay[kTokens - 1]);
    if (t >= kTokens) return;
    const float sum = s.decay[t], from = __expf(sum);
    space.factors[kFrom * kTokens + t] = from * weight_scale;
    space.factors[kRecall * kTokens + t] = this->IsNew(t) ? from : 0.0f;  // what an old token recalled is in its u
    space.factors[kTo * kTokens + t] = __expf(s.decay[kTokens - 1] - sum) * (kDelta ? 1.0f : in.rate[t]);
  }
  __device__ __forceinline__ void StoreHeads() {
    for (int i = threadIdx.x; i < kTokens * kKeys / 8; i += kPrepareThreads) {
      const int t = i / (kKeys / 8), c = i % (kKeys / 8) * 8;
      *reinterpret_cast<uint4*>(space.query + t * kKeys + c) = *reinterpret_cast<const uint4*>(in.q + t * kRow + c);
      *reinterpret_cast<uint4*>(space.keys + t * kKeys + c) = *reinterpret_cast<const uint4*>(in.k + t * kRow + c);
    }
  }

  // A warp has 16 rows; what lies above the diagonal is not multiplied.
  __device__ __forceinline__ void Multiply() {
    const uint32_t q_at = SharedAddress(in.q), k_at = SharedAddress(in.k);
    float by_q[8][4] = {}, by_k[kDelta ? 8 : 1][4] = {};
#pragma unroll
    for (int c = 0; c < kKeys; c += 16) {
      uint32_t q[4], k[4];
      LoadA(q, q_at, kRow, 16 * warp, c);
      if constexpr (kDelta) LoadA(k, k_at, kRow, 16 * warp, c);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > warp) break;
        uint32_t b[4];
        LoadB(b, k_at, kRow, 16 * n, c);
        BF16Math::Mma(by_q[2 * n], q, b[0], b[1]);
        BF16Math::Mma(by_q[2 * n + 1], q, b[2], b[3]);
        if constexpr (kDelta) {
          BF16Math::Mma(by_k[2 * n], k, b[0], b[1]);
          BF16Math::Mma(by_k[2 * n + 1], k, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n > 2 * warp + 1) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = 16 * warp + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
        const float f0 = __expf(fminf(s.decay[t] - s.decay[j], 0.0f));
        const float f1 = __expf(fminf(s.decay[t] - s.decay[j + 1], 0.0f));
        StoreWeights(t, j, by_q[n][2 * half] * f0, by_q[n][2 * half + 1] * f1);
        if constexpr (kDelta) StoreSystem(t, j, by_k[n][2 * half] * f0, by_k[n][2 * half + 1] * f1);
      }
    }
  }
  // What a token's q weighs two tokens j, j + 1 with; what its k finds of them.
  __device__ __forceinline__ void StoreWeights(int t, int j, float x, float y) const {
    const float w0 = weight_scale * (kDelta ? 1.0f : in.rate[j]), w1 = weight_scale * (kDelta ? 1.0f : in.rate[j + 1]);
    *reinterpret_cast<__nv_bfloat162*>(space.weights + t * kTokens + j) =
        __floats2bfloat162_rn(j <= t ? w0 * x : 0.0f, j + 1 <= t ? w1 * y : 0.0f);
  }
  __device__ __forceinline__ void StoreSystem(int t, int j, float x, float y) {
    const float rate = this->IsNew(t) ? in.rate[t] : 0.0f;
    *reinterpret_cast<float2*>(s.system + t * kSystem + j) =
        make_float2(j < t ? rate * x : 0.0f, j + 1 < t ? rate * y : 0.0f);
  }

  Shared& s;
  float weight_scale = 1;  // of q, if it is used as it came
};

}  // namespace

int LaunchStateChunkPrepare(const StateLaunch* p, void* stream) {
  if (p->vector_decay) return LaunchStateChunkPrepareVector(p, stream);
  return LaunchStatePrepareFor<Preparer>(*p, stream);
}

}  // namespace dovetail::kernels::cuda
