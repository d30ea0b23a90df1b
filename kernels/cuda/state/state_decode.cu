#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/state/state_chunk_parts.cuh"
#include "kernels/cuda/state/state_decode_producers.cuh"
#include "kernels/cuda/state/state_launch.cuh"
#include "kernels/cuda/state/state_launches.h"

// Tokens of linear states one after the other, as state_append.cu has them, where the memory should be the limit: a
// thread block stays on its multiprocessor and takes head after head (or slices of 128, 64 or 32 of their columns). One
// warp copies the next heads' S and tokens to shared memory, seven prepare their new tokens, eight or sixteen multiply:
//   dots of q and k with the span's keys | sums over S and the span's values | o and u | S, if the span is full
// A span is one half of a block: S is kept midway, so that tokens of the second half need not read those of the first.
// racecheck: warp_arrivals.cuh.

namespace dovetail::kernels::cuda {

using namespace decode;

namespace {

#if __CUDA_ARCH__ >= 900

template <int kKeys, int kCols, bool kVector, bool kDelta>
class Summer {
  using Memory = Shared<kKeys, kCols, kVector>;
  using NewToken = Token<kKeys, kCols, kVector>;
  using OldTokens = Span<kKeys, kCols, kVector>;
  static constexpr int kWarps = kSumWarps<kVector>;
  static constexpr int kRing = Memory::kRing, kPartRows = kKeys / kParts, kRows = kPartRows / kWarps;
  static constexpr int kQuads = kCols / 4;  // lanes with different columns
  static constexpr int kPartsPerLane = kParts * kQuads / 32;
  static constexpr int kLane = kKeys / 32;        // channels of a lane
  static constexpr int kEach = kTokens / kWarps;  // tokens of a warp
  static constexpr int kKinds = kDelta ? 2 : 1;   // o, and what a delta rule recalls

 public:
  __device__ Summer(const StateLaunch& launch, Memory& shared) : p(launch), s(shared) {}

  __device__ void Run() {
    const int count = Work::Count(p, kCols);
    uint32_t token_phases = 0;                                            // a bit a ring
    asm volatile("bar.sync 0, %0;" ::"n"(32 * (kWarps + 1)) : "memory");  // MakeBarriers
    for (int n = 0; Work::At(n) < count; ++n) {
      const int ring = n % kTokenWarps;
      first_part = n * kParts;
      WaitForSpan();
      bool last = false, wrote = false;
      for (bool begins = true; !last; begins = false) {
        const NewToken& token = s.tokens[ring];
        BarrierWait(SharedAddress(&s.token_full[ring]), token_phases >> ring & 1);
        token_phases ^= 1u << ring;
        t = token.t, last = token.last != 0;
        if (begins) zero = token.fresh != 0;
        OldTokens& block = s.spans[span_count % kSpans];
        if (token.behind) {
          CatchUp(token, block);
          wrote = true;
          WarpArrive(s.token_empty[ring]);
          ReleaseSpan(wrote);
          WaitForSpan();
          continue;
        }
        const bool ends = t == kTokens - 1, keep = !last || ends;
        release = !keep && !wrote;
        wrote = wrote || keep;
        if (keep) KeepKey(token, block);
        Add(token, block, keep);
        if (ends) Advance(token, block, !last);
        WarpArrive(s.token_empty[ring]);
      }
      ReleaseSpan(wrote);
      if (!wrote) continue;
      for (int part = 0; part < kParts; ++part) WarpArrive(s.part_empty[(first_part + part) % kRing]);
    }
  }

 private:
  __device__ __forceinline__ static void SyncSums() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory"); }
  __device__ __forceinline__ void WaitForSpan() const {
    BarrierWait(SharedAddress(&s.span_full[span_count % kSpans]), span_count / kSpans % 2);
  }
  // `wrote`: to it or to S, where copies come next.
  __device__ __forceinline__ void ReleaseSpan(bool wrote) {
    if (wrote) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    WarpArrive(s.span_empty[span_count++ % kSpans]);
  }

  // Token i of the warp. With vector decays a warp has neighbours, whose decays it multiplies one by one.
  __device__ __forceinline__ int TokenOf(int i) const { return kVector ? kEach * warp + i : warp + kWarps * i; }

  __device__ __forceinline__ static void Widen(const __nv_bfloat16* row, float (&x)[kLane]) {
    if constexpr (kLane == 4) {
      const float4 wide = WidenBF16(*reinterpret_cast<const uint2*>(row));
      x[0] = wide.x, x[1] = wide.y, x[2] = wide.z, x[3] = wide.w;
    } else {
      const float2 wide = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(row));
      x[0] = wide.x, x[1] = wide.y;
    }
  }
  __device__ __forceinline__ static void Narrow(const float (&x)[kLane], __nv_bfloat16* row) {
    if constexpr (kLane == 4) {
      *reinterpret_cast<uint2*>(row) = RoundBF16x4({x[0], x[1], x[2], x[3]});
    } else {
      *reinterpret_cast<__nv_bfloat162*>(row) = __floats2bfloat162_rn(x[0], x[1]);
    }
  }

  // The token becomes one of the span's, in the warp that multiplies it from now on.
  __device__ __forceinline__ void KeepKey(const NewToken& token, OldTokens& block) const {
    if (warp != (kVector ? t / kEach : t % kWarps)) return;
    const int at = t * kKeys + kLane * lane;
    float x[kLane];
#pragma unroll
    for (int c = 0; c < kLane; ++c) x[c] = token.k[kLane * lane + c];
    Narrow(x, block.keys + at);
    if constexpr (kVector) {
#pragma unroll
      for (int c = 0; c < kLane; ++c) x[c] = token.decay[kLane * lane + c];
      Narrow(x, block.decays + at);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Add(const NewToken& token, OldTokens& block, bool keep) {
    if constexpr (kVector) {
      SumDecays(block);
      SyncSums();
      FadeToken(token);
      SyncSums();
    }
    MultiplyKeys(token, block);
    SyncSums();
    float sums[8];
    if constexpr (kPartsPerLane < kParts) {
      for (int part = 0; part < kParts; ++part) WaitForPart(part);
    }
    SumParts<kPartsPerLane>(token, block, lane / kQuads * kPartsPerLane, sums);
#pragma unroll
    for (int step = kQuads; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < 4 * kKinds; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    if constexpr (kPartsPerLane < kParts) {
      for (int part = 0; part < kParts; ++part) ReleasePart(part);
    }
    if (lane < kQuads) {
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind)
        *reinterpret_cast<float4*>(&s.reduce[warp][kind][4 * lane]) = {sums[4 * kind], sums[4 * kind + 1],
                                                                       sums[4 * kind + 2], sums[4 * kind + 3]};
    }
    SyncSums();
    if (threadIdx.x < kCols) Finish(token, block, keep);
  }

  __device__ __forceinline__ void SumDecays(const OldTokens& block) {
    float sum[kLane] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = kEach * warp + i;
      if (j >= t) break;
      float decay[kLane];
      Widen(block.decays + j * kKeys + kLane * lane, decay);
#pragma unroll
      for (int c = 0; c < kLane; ++c) sum[c] += decay[c];
    }
#pragma unroll
    for (int c = 0; c < kLane; ++c) s.range[warp][kLane * lane + c] = sum[c];
  }
  __device__ __forceinline__ void FadeToken(const NewToken& token) {
    const int c = threadIdx.x;
    if (c >= kKeys) return;
    float sum = token.decay[c];
#pragma unroll
    for (int w = kWarps - 1; w >= 0; --w) {
      const float own = s.range[w][c];
      s.range[w][c] = kLog2E * sum;
      sum += own;
    }
    s.log_total[c] = sum;
    const float total = __expf(sum);
    s.query[c] = token.q[c] * total;
    s.recall[c] = token.k[c] * total;
  }
  // log2 of the decays of what comes behind the warp's tokens, up to the token at hand.
  __device__ __forceinline__ void LoadLater(float (&later)[kLane]) const {
#pragma unroll
    for (int c = 0; c < kLane; ++c) later[c] = s.range[warp][kLane * lane + c];
  }

  __device__ __forceinline__ void MultiplyKeys(const NewToken& token, const OldTokens& block) {
    if (TokenOf(0) >= t) return;
    float q[kLane], k[kLane], later[kLane], sums[kKinds * kEach] = {};
#pragma unroll
    for (int c = 0; c < kLane; ++c) q[c] = token.q[kLane * lane + c], k[c] = token.k[kLane * lane + c];
    if constexpr (kVector) LoadLater(later);
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      const int j = TokenOf(i);
      if (j >= t) continue;
      float key[kLane];
      Widen(block.keys + j * kKeys + kLane * lane, key);
      if constexpr (kVector) {
        float decay[kLane];
        Widen(block.decays + j * kKeys + kLane * lane, decay);
#pragma unroll
        for (int c = 0; c < kLane; ++c) key[c] *= Exp2(later[c]), later[c] += kLog2E * decay[c];
      }
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        sums[i] += q[c] * key[c];
        if constexpr (kDelta) sums[kEach + i] += k[c] * key[c];
      }
    }
    float sum = TransposeSum(sums);
    const int kind = lane / kEach, j = TokenOf(lane % kEach);
    if (kind >= kKinds || j >= t) return;
    if constexpr (!kVector) sum *= token.fade[j];
    s.dots[kind][j] = sum;
  }

  __device__ __forceinline__ void WaitForPart(int part) const {
    const int at = first_part + part;
    BarrierWait(SharedAddress(&s.part_full[at % kRing]), at / kRing % 2);
  }
  __device__ __forceinline__ void ReleasePart(int part) const {
    if (release) WarpArrive(s.part_empty[(first_part + part) % kRing]);
  }

  // Parts [first, first + kCount) of S and their tokens, for the lane's four columns: o, then what is recalled.
  template <int kCount>
  __device__ __forceinline__ void SumParts(const NewToken& token, const OldTokens& block, int first,
                                           float (&sums)[8]) const {
    if constexpr (kCount == 1) {
      SumPart(token, block, first, sums);
    } else {
      float more[8];
      SumParts<kCount / 2>(token, block, first, sums);
      SumParts<kCount / 2>(token, block, first + kCount / 2, more);
#pragma unroll
      for (int i = 0; i < 4 * kKinds; ++i) sums[i] += more[i];
    }
  }
  __device__ __forceinline__ void SumPart(const NewToken& token, const OldTokens& block, int part,
                                          float (&sums)[8]) const {
    const int quad = lane % kQuads;
    const auto add = [&](float by_query, float by_recall, const float4& x) {
      sums[0] += by_query * x.x, sums[1] += by_query * x.y, sums[2] += by_query * x.z, sums[3] += by_query * x.w;
      if constexpr (kDelta)
        sums[4] += by_recall * x.x, sums[5] += by_recall * x.y, sums[6] += by_recall * x.z, sums[7] += by_recall * x.w;
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0;
    if constexpr (kPartsPerLane == kParts) WaitForPart(part);
    if (!zero) {
      const float* const from = s.parts[(first_part + part) % kRing];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = warp * kRows + i, c = part * kPartRows + row, at = row * kCols + 4 * quad;
        const auto* const narrow = reinterpret_cast<const __nv_bfloat16*>(from) + at;
        const float4 x = p.state_bf16 ? WidenBF16(*reinterpret_cast<const uint2*>(narrow))
                                      : *reinterpret_cast<const float4*>(from + at);
        add(kVector ? s.query[kVector ? c : 0] : token.q[c], kVector ? s.recall[kVector ? c : 0] : token.k[c], x);
      }
      if constexpr (!kVector) {
#pragma unroll
        for (int i = 0; i < 4 * kKinds; ++i) sums[i] *= token.total;
      }
    }
    if constexpr (kPartsPerLane == kParts) ReleasePart(part);
#pragma unroll
    for (int j = warp + kWarps * part; j < kTokens; j += kWarps * kParts)
      if (j < t) {
        const uint2 value = *reinterpret_cast<const uint2*>(block.values + j * kCols + 4 * quad);
        add(s.dots[0][j], s.dots[1][j], WidenBF16(value));
      }
  }

  // A thread a column.
  __device__ __forceinline__ void Finish(const NewToken& token, OldTokens& block, bool keep) {
    const int c = threadIdx.x;
    float o = 0, recalled = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      o += s.reduce[w][0][c];
      if constexpr (kDelta) recalled += s.reduce[w][1][c];
    }
    const float v = token.v[c];
    const __nv_bfloat16 u = __float2bfloat16_rn(token.rate * (v - recalled));
    reinterpret_cast<__nv_bfloat16*>(token.value_row)[c] = u;
    if (keep) block.values[t * kCols + c] = u;
    StoreWire(p.wire, token.out, c, o + token.own * __bfloat162float(u) + token.skip * v);
  }

  // S after the block's first span, whose tokens have long been there.
  __device__ __forceinline__ void CatchUp(const NewToken& token, OldTokens& block) {
    if constexpr (kVector) {
      SumDecays(block);
      SyncSums();
      FadeToken(token);
    }
    for (int part = 0; part < kParts; ++part) WaitForPart(part);
    Advance(token, block, /*more=*/true);
  }

  // S after the span: keys faded to its end, in two roundings to bf16, times values, on tensor cores. Their rows are
  // put into an order in which no two that are read at once share a bank.
  __device__ __forceinline__ static int KeyAt(int t, int chunk) { return t * kKeys + (chunk ^ t % 8) * 8; }
  __device__ __forceinline__ static int ValueAt(int t, int chunk) {
    return t * kCols + (chunk ^ (kCols == 32 ? t / 2 % 4 : t % 8)) * 8;
  }

  __device__ __forceinline__ void Advance(const NewToken& token, OldTokens& block, bool more) {
    SyncSums();
    __nv_bfloat16* const low = kVector ? block.decays : s.low;
    FadeKeys(token, block, low);
    OrderValues(block);
    SyncSums();
    constexpr int kAcross = kCols / 32, kDown = kWarps / kAcross;
    const int column = warp % kAcross * 32;
    for (int row = warp / kAcross * 16; row < kKeys; row += kDown * 16) {
      float sums[4][4];
      const auto each = [&](auto&& work) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + lane / 4 + 8 * half;
          float* const part = s.parts[(first_part + r / kPartRows) % kRing];
          std::byte* const to = token.block.Row(p.layout.state, r);
#pragma unroll
          for (int n = 0; n < 4; ++n)
            work(r, r % kPartRows * kCols + column + 8 * n + lane % 4 * 2, part, to, sums[n][2 * half],
                 sums[n][2 * half + 1]);
        }
      };
      LoadTile(token, row, column, sums);
      MultiplyTile(sums, block.keys, low, block.values, row, column);
      each([&](int, int at, float* part, std::byte* to, float x, float y) {
        const int c = first_column() + at % kCols;
        if (p.state_bf16) {
          const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
          *reinterpret_cast<__nv_bfloat162*>(to + 2 * c) = rounded;
          if (more) *reinterpret_cast<__nv_bfloat162*>(reinterpret_cast<__nv_bfloat16*>(part) + at) = rounded;
        } else {
          *reinterpret_cast<float2*>(to + 4 * c) = make_float2(x, y);
          if (more) *reinterpret_cast<float2*>(part + at) = make_float2(x, y);
        }
      });
    }
    zero = false;
    if (threadIdx.x == 0) MidwayWord(p, token.block, first_column()) = token.second ? 0 : kMidway;
    SyncSums();
  }
  // Faded S as accumulators. Rows begin in one bank: each reads its four tiles from another one on and turns them back.
  __device__ __forceinline__ void LoadTile(const NewToken& token, int row, int column, float (&sums)[4][4]) const {
    const int turn = lane / 4 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + lane / 4 + 8 * half;
      const float total = kVector ? __expf(s.log_total[kVector ? r : 0]) : token.total;
      const float* const part = s.parts[(first_part + r / kPartRows) % kRing];
      float2 old[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = r % kPartRows * kCols + column + 8 * ((n + turn) % 4) + lane % 4 * 2;
        const auto* const narrow = reinterpret_cast<const __nv_bfloat16*>(part) + at;
        old[n] = zero           ? make_float2(0, 0)
                 : p.state_bf16 ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(narrow))
                                : *reinterpret_cast<const float2*>(part + at);
      }
      const bool by_one = turn % 2 != 0, by_two = turn / 2 != 0;
      const float2 once[4] = {by_one ? old[3] : old[0], by_one ? old[0] : old[1], by_one ? old[1] : old[2],
                              by_one ? old[2] : old[3]};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 x = by_two ? once[(n + 2) % 4] : once[n];
        sums[n][2 * half] = total * x.x;
        sums[n][2 * half + 1] = total * x.y;
      }
    }
  }
  // Of the slice: that of the work at hand.
  __device__ __forceinline__ int first_column() const {
    return Work::At(first_part / kParts) % (p.value_dim / kCols) * kCols;
  }

  __device__ __forceinline__ void FadeKeys(const NewToken& token, OldTokens& block, __nv_bfloat16* low) {
    const int channel = kLane * lane, chunk = channel / 8;
    float high_part[kEach][kLane], low_part[kEach][kLane], later[kLane];
    if constexpr (kVector) {
      LoadLater(later);
      if (warp == kWarps - 1)  // which has the token itself
#pragma unroll
        for (int c = 0; c < kLane; ++c) later[c] = 0;
    }
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      const int j = kEach * warp + i;
      Widen(block.keys + j * kKeys + channel, high_part[i]);
      float decay[kLane];
      if constexpr (kVector) Widen(block.decays + j * kKeys + channel, decay);
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        const float x = high_part[i][c] * (kVector ? Exp2(later[c]) : token.fade[kVector ? 0 : j]);
        if constexpr (kVector) later[c] += kLog2E * decay[c];
        high_part[i][c] = RoundBF16(x);
        low_part[i][c] = x - high_part[i][c];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = KeyAt(kEach * warp + i, chunk) + channel % 8;
      Narrow(high_part[i], block.keys + at);
      Narrow(low_part[i], low + at);
    }
  }
  __device__ __forceinline__ void OrderValues(OldTokens& block) {
    constexpr int kChunks = kCols / 8, kAll = kEach * kChunks, kOwn = (kAll + 31) / 32;
    uint4 bits[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (kAll < 32 && lane >= kAll) continue;
      const int at = lane + 32 * i, j = kEach * warp + at / kChunks;
      bits[i] = *reinterpret_cast<const uint4*>(block.values + j * kCols + at % kChunks * 8);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (kAll < 32 && lane >= kAll) continue;
      const int at = lane + 32 * i, j = kEach * warp + at / kChunks;
      *reinterpret_cast<uint4*>(block.values + ValueAt(j, at % kChunks)) = bits[i];
    }
  }

  // 16 rows of S, 32 columns.
  __device__ __forceinline__ void MultiplyTile(float (&sums)[4][4], const __nv_bfloat16* high, const __nv_bfloat16* low,
                                               const __nv_bfloat16* values, int row, int column) const {
    const uint32_t high_at = SharedAddress(high), low_at = SharedAddress(low), values_at = SharedAddress(values);
#pragma unroll
    for (int k = 0; k < kTokens; k += 16) {
      const int key_t = k + lane % 8 + lane / 16 * 8, value_t = k + lane % 16;
      const int key = 2 * KeyAt(key_t, row / 8 + lane / 8 % 2);
      uint32_t a[4], b[2][4], rest[4];
      LoadMatricesTransposed(a, high_at + key);
      LoadMatricesTransposed(rest, low_at + key);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        LoadMatricesTransposed(b[n], values_at + 2 * ValueAt(value_t, column / 8 + 2 * n + lane / 16));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        BF16Math::Mma(sums[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        BF16Math::Mma(sums[n], rest, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  const StateLaunch& p;
  Memory& s;
  int t = 0, first_part = 0, span_count = 0;
  bool zero = false, release = false;  // S is; its parts go as soon as they have been read
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
};

template <int kKeys, int kCols, bool kVector, bool kDelta>
__device__ void Decode(const StateLaunch& p, std::byte* memory) {
  using Memory = Shared<kKeys, kCols, kVector>;
  constexpr int kWarps = kSumWarps<kVector>;
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    if constexpr (kVector) TakeRegisters<64, false>();
    Summer<kKeys, kCols, kVector, kDelta>(p, s).Run();
    return;
  }
  const bool copies = warp == kWarps + kTokenWarps;
  if (copies) MakeBarriers(s);
  if constexpr (kVector) TakeRegisters<112, true>();
  if (!copies) {
    Preparer<kKeys, kCols, kVector, kDelta>(p, s, warp - kWarps).Run();
  } else {
    Copier<kKeys, kCols, kVector>(p, s).Run();
  }
}

#endif

template <int kKeys, int kCols, bool kVector, bool kDelta>
__global__ void __launch_bounds__(kThreads<kVector>, 1) StateDecodeKernel(const __grid_constant__ StateLaunch p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte memory[];
  if (!IsVoid(p)) Decode<kKeys, kCols, kVector, kDelta>(p, memory);
#endif
}

template <int kKeys, int kCols, bool kVector, bool kDelta>
int Launch(const StateLaunch& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kKeys, kCols, kVector>);
  static_assert(kBytes <= kSharedBytes);
  return LaunchStateKernel(StateDecodeKernel<kKeys, kCols, kVector, kDelta>,
                           min(p.unit_count * (p.value_dim / kCols), multiprocessors), kThreads<kVector>, kBytes, p,
                           stream);
}

template <int kKeys, int kCols>
int LaunchFamily(const StateLaunch& p, int multiprocessors, cudaStream_t stream) {
  if (p.vector_decay)
    return p.delta ? Launch<kKeys, kCols, true, true>(p, multiprocessors, stream)
                   : Launch<kKeys, kCols, true, false>(p, multiprocessors, stream);
  return p.delta ? Launch<kKeys, kCols, false, true>(p, multiprocessors, stream)
                 : Launch<kKeys, kCols, false, false>(p, multiprocessors, stream);
}

template <int kKeys>
int LaunchKeys(const StateLaunch& p, int multiprocessors, cudaStream_t stream) {
  if (p.value_dim % 128 == 0) return LaunchFamily<kKeys, 128>(p, multiprocessors, stream);
  if (p.value_dim % 64 == 0) return LaunchFamily<kKeys, 64>(p, multiprocessors, stream);
  return LaunchFamily<kKeys, 32>(p, multiprocessors, stream);
}

}  // namespace

int LaunchStateDecode(const StateLaunch* p, void* stream) {
  int multiprocessors = 0;
  if (const int error = CountMultiprocessors(multiprocessors); error != 0) return error;
  auto* const on = static_cast<cudaStream_t>(stream);
  return p->key_dim == 64 ? LaunchKeys<64>(*p, multiprocessors, on) : LaunchKeys<128>(*p, multiprocessors, on);
}

}  // namespace dovetail::kernels::cuda
