#pragma once
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/state/state_decode_shared.cuh"

// The warps of the decode kernel that bring what the others multiply: one copies S and the blocks' tokens, the others
// make tokens ready (convolution, norms, decays) and write them to their blocks. They run ahead as far as there is
// room. Device code only.

namespace dovetail::kernels::cuda::decode {

#if __CUDA_ARCH__ >= 900

// Called by the warp that copies, which does not wait. Warps that multiply or prepare tokens wait for it once each,
// before they use an mbarrier.
template <int kKeys, int kCols, bool kVector>
__device__ __forceinline__ void MakeBarriers(Shared<kKeys, kCols, kVector>& s) {
  constexpr int kRing = Shared<kKeys, kCols, kVector>::kRing;
  static_assert(kRing <= 32);
  const int lane = threadIdx.x % 32;
  const auto init = [](uint64_t& full, uint64_t& empty, int arrivals) {
    BarrierInit(SharedAddress(&full), arrivals);
    BarrierInit(SharedAddress(&empty), kSumWarps<kVector> * kWarpArrivals);
  };
  if (lane < kRing) init(s.part_full[lane], s.part_empty[lane], 1);
  if (lane < kSpans) init(s.span_full[lane], s.span_empty[lane], 1);
  if (lane < kTokenWarps) init(s.token_full[lane], s.token_empty[lane], kWarpArrivals);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  asm volatile("bar.arrive 0, %0;" ::"n"(32 * (kSumWarps<kVector> + 1)) : "memory");
  asm volatile("bar.arrive 2, %0;" ::"n"(32 * (kTokenWarps + 1)) : "memory");
}

// Rows [0, end) of a section, `bytes` of each from column_bytes on, `bytes` apart in shared memory. All lanes call it.
__device__ __forceinline__ void CopyRows(const FoundBlock& block, const StateSection& section, int begin, int end,
                                         int column_bytes, int bytes, uint32_t to, uint32_t bar) {
  const int lane = threadIdx.x % 32;
  if (bytes != section.row_bytes) {
    for (int row = begin + lane; row < end; row += 32)
      BulkCopy(to + (row - begin) * bytes, block.Row(section, row) + column_bytes, bytes, bar);
    return;
  }
  for (int row = begin, run = 0; row < end; ++run) {  // rows of a piece lie one behind the other
    int stop = section.first_rows;
    if (row >= stop) stop += ((row - stop) / section.piece_rows + 1) * section.piece_rows;
    stop = min(stop, end);
    if (lane == run % 32) BulkCopy(to + (row - begin) * bytes, block.Row(section, row), (stop - row) * bytes, bar);
    row = stop;
  }
}

// Whether a token at `place` of the block begins from S midway.
__device__ __forceinline__ bool HasMidway(const StateLaunch& p, const FoundBlock& block, int place, int column) {
  return place >= kTokens && MidwayWord(p, block, column) == kMidway;
}

template <int kKeys, int kCols, bool kVector>
class Copier {
 public:
  __device__ Copier(const StateLaunch& launch, Shared<kKeys, kCols, kVector>& shared) : p(launch), s(shared) {}

  // A lane finds where a head's state lies, for 32 heads at a time.
  __device__ void Run() {
    const int count = Work::Count(p, kCols);
    for (int first = 0; Work::At(first) < count; first += 32) {
      Task found = {};
      if (Work::At(first + lane) < count) found = Find(first + lane);
      for (int i = 0; i < 32 && Work::At(first + i) < count; ++i) {
        const Task task = Of(found, i);
        CopyTokens(task, task.behind ? 0 : task.place - task.place % kTokens, task.behind ? kTokens : task.place);
        CopyState(first + i, task);
        if (task.behind) CopyTokens(task, kTokens, task.place);
      }
    }
  }

 private:
  struct Task {
    int first_column, place, fresh, behind;  // place: in the block
    FoundBlock from, block;                  // from: where S lies
  };
  __device__ __forceinline__ Task Find(int n) const {
    const Work work(p, kCols, n);
    const StateItem& item = p.items[work.unit.item];
    Task task;
    const int64_t number = item.first_position / kStateTokens;
    task.first_column = work.first_column;
    task.place = static_cast<int>(item.first_position % kStateTokens);
    task.block = task.from = FoundBlock::Of(BlockOf(p, item, work.unit.head, number));
    const bool midway = HasMidway(p, task.block, task.place, task.first_column);
    task.behind = task.place >= kTokens && !midway;
    task.fresh = number == 0 && !midway;
    if (number > 0 && !midway) task.from = FoundBlock::Of(BlockOf(p, item, work.unit.head, number - 1));
    return task;
  }
  __device__ __forceinline__ Task Of(const Task& found, int from) const {
    const auto shuffle = [&](auto x) {
      const auto bits = __shfl_sync(~0u, reinterpret_cast<uint64_t>(x), from);
      return reinterpret_cast<decltype(x)>(bits);
    };
    Task task;
    task.first_column = __shfl_sync(~0u, found.first_column, from);
    task.place = __shfl_sync(~0u, found.place, from);
    task.fresh = __shfl_sync(~0u, found.fresh, from);
    task.behind = __shfl_sync(~0u, found.behind, from);
    task.from = {shuffle(found.from.entries), shuffle(found.from.base), p.even ? p.step : 0};
    task.block = {shuffle(found.block.entries), shuffle(found.block.base), p.even ? p.step : 0};
    return task;
  }

  __device__ __forceinline__ void CopyTokens(const Task& task, int begin, int end) {
    constexpr int kKeyBytes = 2 * kKeys, kValueBytes = 2 * kCols;
    const int stage = span_count % kSpans;
    auto& to = s.spans[stage];
    const uint32_t bar = SharedAddress(&s.span_full[stage]);
    BarrierWait(SharedAddress(&s.span_empty[stage]), (span_count / kSpans + 1) % 2);
    if (lane == 0) BarrierArriveExpect(bar, (end - begin) * ((kVector ? 2 : 1) * kKeyBytes + kValueBytes));
    __syncwarp();
    CopyRows(task.block, p.layout.keys, begin, end, 0, kKeyBytes, SharedAddress(to.keys), bar);
    if constexpr (kVector)
      CopyRows(task.block, p.layout.decays, begin, end, 0, kKeyBytes, SharedAddress(to.decays), bar);
    CopyRows(task.block, p.layout.values, begin, end, 2 * task.first_column, kValueBytes, SharedAddress(to.values),
             bar);
    ++span_count;
  }

  __device__ __forceinline__ void CopyState(int n, const Task& task) {
    constexpr int kRing = Shared<kKeys, kCols, kVector>::kRing, kRows = kKeys / kParts;
    const int element = p.state_bf16 ? 2 : 4, bytes = kCols * element;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int at = n * kParts + part, slot = at % kRing;
      const uint32_t bar = SharedAddress(&s.part_full[slot]);
      BarrierWait(SharedAddress(&s.part_empty[slot]), (at / kRing + 1) % 2);
      if (lane == 0) BarrierArriveExpect(bar, task.fresh ? 0 : kRows * bytes);
      __syncwarp();
      if (task.fresh) continue;
      CopyRows(task.from, p.layout.state, part * kRows, (part + 1) * kRows, task.first_column * element, bytes,
               SharedAddress(s.parts[slot]), bar);
    }
  }

  const StateLaunch& p;
  Shared<kKeys, kCols, kVector>& s;
  int span_count = 0;
  const int lane = threadIdx.x % 32;
};

// Warp `ring` of those that prepare tokens: heads ring, ring + kTokenWarps, .. of the thread block.
template <int kKeys, int kCols, bool kVector, bool kDelta>
class Preparer {
  static constexpr int kHalf = kKeys / 8;  // lanes that have q; as many have k
  static constexpr int kOwn = kKeys / 32;  // vector decays of a lane

 public:
  __device__ Preparer(const StateLaunch& launch, Shared<kKeys, kCols, kVector>& shared, int ring)
      : p(launch),
        s(shared.tokens[ring]),
        full(shared.token_full[ring]),
        empty(SharedAddress(&shared.token_empty[ring])),
        first(ring) {}

  __device__ void Run() {
    const int all = Work::Count(p, kCols);
    if (Work::At(first) >= all) AwaitBarriers();
    for (int n = first; Work::At(n) < all; n += kTokenWarps) {
      const Work work(p, kCols, n);
      const StateItem item = p.items[work.unit.item];
      const StateBlock block = BlockOf(p, item, work.unit.head, item.first_position / kStateTokens);
      const int place = static_cast<int>(item.first_position % kStateTokens);
      Inputs inputs;
      if constexpr (!kVector) inputs = Load(work, item, 0);  // meanwhile; vector decays leave no registers for it
      if (place >= kTokens && !HasMidway(p, FoundBlock::Of(block), place, work.first_column))
        PrepareFirstSpan(block, item);
      for (int row = 0; row < item.rows; ++row) {
        if (kVector || row > 0) inputs = Load(work, item, row);
        Prepare(work, item, row, inputs);
      }
    }
  }

 private:
  // What comes with a token: the lane's channels of q or k, and of v, also as they came; its decays and rate.
  struct Inputs {
    float x[8] = {}, v[8], decay[kOwn], log_decay = 0, rate = 1;
    uint4 raw, raw_v;
  };
  __device__ __forceinline__ Inputs Load(const Work& work, const StateItem& item, int row) const {
    Inputs in;
    const int head = work.unit.head;
    if (kind < 2) StateInput8(p, item, head, row, kind * kKeys + channel, in.x, in.raw);
    if (lane < kCols / 8) StateInput8(p, item, head, row, 2 * kKeys + work.first_column + 8 * lane, in.v, in.raw_v);
    const float* const gates = p.gates > 0 ? GatesOf(p, item, head, row) : nullptr;
    if (p.token_rate) in.rate = gates[p.token_decay ? (kVector ? kKeys : 1) : 0];
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) in.decay[i] = RoundBF16(fmaxf(gates[lane + 32 * i], kLowestLogDecay));
    } else {
      in.log_decay = fmaxf(p.token_decay ? gates[0] : p.log_decay[item.first_head + head], kLowestLogDecay);
    }
    return in;
  }

  __device__ __forceinline__ static void AwaitBarriers() {
    asm volatile("bar.sync 2, %0;" ::"n"(32 * (kTokenWarps + 1)) : "memory");
  }
  __device__ __forceinline__ void WaitForRoom() const {
    if (count == 0) AwaitBarriers();
    BarrierWait(empty, (count + 1) % 2);
    __syncwarp();
  }

  // The block's first span is to become S midway.
  __device__ __forceinline__ void PrepareFirstSpan(const StateBlock& block, const StateItem& item) {
    float decay[kOwn], fade = 0, total = 1;
    if constexpr (kVector) {
      const auto* const decays = reinterpret_cast<const __nv_bfloat16*>(block.Row(p.layout.decays, kTokens - 1));
#pragma unroll
      for (int i = 0; i < kOwn; ++i) decay[i] = __bfloat162float(decays[lane + 32 * i]);
    } else {
      log_decays = reinterpret_cast<const float*>(block.Row(p.layout.decays, 0))[lane];
      total = Fade(fade);
    }
    WaitForRoom();
    StoreDecays(decay, fade);
    if (lane == 0) {
      s.total = total;
      s.t = kTokens - 1, s.second = 0;
      s.last = 0, s.fresh = item.first_position < kStateTokens, s.behind = 1;
      s.block = FoundBlock::Of(block);
    }
    WarpArrive(full);
    ++count;
  }

  __device__ __forceinline__ void Prepare(const Work& work, const StateItem& item, int row, Inputs& in) {
    const int head = work.unit.head;
    const int64_t position = item.first_position + row;
    const int place = static_cast<int>(position % kStateTokens), t = place % kTokens;  // in the block, the span
    const StateBlock block = BlockOf(p, item, head, position / kStateTokens);
    if constexpr (!kVector) FindDecays(block, row, place, in.log_decay);
    Scale(in.x);
    const uint4 key = Round(in.x);
    const float own = Own(in.x);
    float fade = 0, total = 1;
    if constexpr (!kVector) total = Fade(fade);

    WriteBlock(work, block, place, key, in);
    WaitForRoom();
    Store(in.x, in.v);
    StoreDecays(in.decay, fade);
    if (lane == 0) {
      s.total = total, s.rate = in.rate, s.own = own;
      s.skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
      s.t = t, s.second = place >= kTokens;
      s.last = row + 1 == item.rows, s.fresh = item.first_position < kTokens, s.behind = 0;
      s.block = FoundBlock::Of(block);
      s.value_row = block.Row(p.layout.values, place) + 2 * work.first_column;
      s.out = p.out + item.out_offset +
              2 * ((static_cast<int64_t>(row) * item.heads + head) * p.value_dim + work.first_column);
    }
    WarpArrive(full);
    ++count;
  }

  // Logarithms of the decays of the span's tokens, each in its lane.
  __device__ __forceinline__ void FindDecays(const StateBlock& block, int row, int place, float log_decay) {
    const int t = place % kTokens;
    if (t == 0) {
      log_decays = 0;
    } else if (row == 0) {
      const auto* const decays = reinterpret_cast<const float*>(block.Row(p.layout.decays, 0));
      log_decays = lane < t ? decays[place - t + lane] : 0.0f;
    }
    if (lane == t) log_decays = log_decay;
  }
  // What is left of the lane's token; returns what is left of S.
  __device__ __forceinline__ float Fade(float& fade) const {
    float sum = log_decays;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more = __shfl_down_sync(~0u, sum, step);
      if (lane + step < 32) sum += more;
    }
    const float all = __shfl_sync(~0u, sum, 0), after = __shfl_down_sync(~0u, sum, 1);
    fade = __expf(lane < 31 ? after : 0.0f);
    return __expf(all);
  }

  __device__ __forceinline__ void Scale(float (&x)[8]) const {
    float scale = kind == 0 ? p.query_scale : 1.0f;
    if (p.normalise) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
      scale *= rsqrtf(WarpSum<kHalf>(squares) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale;
  }
  // Keys are rounded as they are stored.
  __device__ __forceinline__ uint4 Round(float (&x)[8]) const {
    float rounded[8];
    uint4 bits;
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[i] = x[i];
    StoreWire8(WireType::kBF16, &bits, 0, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = kind == 1 ? rounded[i] : x[i];
    return bits;
  }
  __device__ __forceinline__ float Own(const float (&x)[8]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * __shfl_xor_sync(~0u, x[i], kHalf);
    return WarpSum<kHalf>(sum);
  }

  __device__ __forceinline__ void WriteBlock(const Work& work, const StateBlock& block, int place, const uint4& key,
                                             const Inputs& in) const {
    std::byte* const history = p.conv_width > 0 ? block.Row(p.layout.history, place) : nullptr;
    if (history != nullptr && lane < kCols / 8)
      *reinterpret_cast<uint4*>(history + 2 * (2 * kKeys + work.first_column + 8 * lane)) = in.raw_v;
    if (!work.first) return;
    if (history != nullptr && kind < 2) *reinterpret_cast<uint4*>(history + 2 * (kind * kKeys + channel)) = in.raw;
    if (kind == 1) *reinterpret_cast<uint4*>(block.Row(p.layout.keys, place) + 2 * channel) = key;
    if constexpr (kVector) {
      auto* const to = reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.decays, place));
#pragma unroll
      for (int i = 0; i < kOwn; ++i) to[lane + 32 * i] = __float2bfloat16_rn(in.decay[i]);
    } else if (lane == 0) {
      reinterpret_cast<float*>(block.Row(p.layout.decays, 0))[place] = in.log_decay;
    }
  }

  __device__ __forceinline__ void Store(const float (&x)[8], const float (&v)[8]) {
    const auto put = [](float* to, const float(&from)[8]) {
      reinterpret_cast<float4*>(to)[0] = {from[0], from[1], from[2], from[3]};
      reinterpret_cast<float4*>(to)[1] = {from[4], from[5], from[6], from[7]};
    };
    if (kind < 2) put((kind == 0 ? s.q : s.k) + channel, x);
    if (lane < kCols / 8) put(s.v + 8 * lane, v);
  }
  __device__ __forceinline__ void StoreDecays(const float (&decay)[kOwn], float fade) {
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) s.decay[lane + 32 * i] = decay[i];
    } else {
      s.fade[lane] = fade;
    }
  }

  const StateLaunch& p;
  Token<kKeys, kCols, kVector>& s;
  uint64_t& full;
  const uint32_t empty;
  const int first;
  uint32_t count = 0;    // of tokens so far
  float log_decays = 0;  // scalar: of token `lane` of the span
  const int lane = threadIdx.x % 32, kind = lane / kHalf, channel = lane % kHalf * 8;  // kind: 0 q, 1 k
};

#endif

}  // namespace dovetail::kernels::cuda::decode
