#pragma once
#include "kernels/cuda/state_decode_shared.cuh"
#include "kernels/cuda/warp_sums.cuh"

// The warps of the decode kernel that bring what the others multiply: one copies S and the blocks' tokens, the others
// make tokens ready (convolution, norms, decays) and write them to their blocks. They run ahead as far as there is
// room. Device code only.

namespace dovetail::kernels::cuda::decode {

#if __CUDA_ARCH__ >= 900

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
    if (lane == run % 32)
      BulkCopy(to + (row - begin) * bytes, block.Row(section, row), (stop - row) * bytes, bar);
    row = stop;
  }
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
        CopyTokens(first + i, task);
        CopyState(first + i, task);
      }
    }
  }

 private:
  struct Task {
    int first_column, t, fresh;
    FoundBlock before, block;
  };
  __device__ __forceinline__ Task Find(int n) const {
    const Work work(p, kCols, n);
    const StateItem& item = p.items[work.unit.item];
    Task task;
    const int64_t number = item.first_position / kTokens;
    task.first_column = work.first_column;
    task.t = static_cast<int>(item.first_position % kTokens);
    task.fresh = number == 0;
    task.block = FoundBlock::Of(BlockOf(p, item, work.unit.head, number));
    task.before = FoundBlock::Of(BlockOf(p, item, work.unit.head, number - (task.fresh ? 0 : 1)));
    return task;
  }
  __device__ __forceinline__ Task Of(const Task& found, int from) const {
    const auto shuffle = [&](auto x) {
      const auto bits = __shfl_sync(~0u, reinterpret_cast<uint64_t>(x), from);
      return reinterpret_cast<decltype(x)>(bits);
    };
    Task task;
    task.first_column = __shfl_sync(~0u, found.first_column, from);
    task.t = __shfl_sync(~0u, found.t, from);
    task.fresh = __shfl_sync(~0u, found.fresh, from);
    task.before = {shuffle(found.before.entries), shuffle(found.before.base), p.even ? p.step : 0};
    task.block = {shuffle(found.block.entries), shuffle(found.block.base), p.even ? p.step : 0};
    return task;
  }

  __device__ __forceinline__ void CopyTokens(int n, const Task& task) {
    constexpr int kKeyBytes = 2 * kKeys, kValueBytes = 2 * kCols;
    const int stage = n % kBlocks;
    auto& to = s.blocks[stage];
    const uint32_t bar = SharedAddress(&s.block_full[stage]);
    BarrierWait(SharedAddress(&s.block_empty[stage]), (n / kBlocks + 1) % 2);
    if (lane == 0) BarrierArriveExpect(bar, task.t * ((kVector ? 2 : 1) * kKeyBytes + kValueBytes));
    __syncwarp();
    CopyRows(task.block, p.layout.keys, 0, task.t, 0, kKeyBytes, SharedAddress(to.keys), bar);
    if constexpr (kVector)
      CopyRows(task.block, p.layout.decays, 0, task.t, 0, kKeyBytes, SharedAddress(to.decays), bar);
    CopyRows(task.block, p.layout.values, 0, task.t, 2 * task.first_column, kValueBytes, SharedAddress(to.values), bar);
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
      CopyRows(task.before, p.layout.state, part * kRows, (part + 1) * kRows, task.first_column * element, bytes,
               SharedAddress(s.parts[slot]), bar);
    }
  }

  const StateLaunch& p;
  Shared<kKeys, kCols, kVector>& s;
  const int lane = threadIdx.x % 32;
};

// Warp `ring` of those that prepare tokens: heads ring, ring + kTokenWarps, .. of the thread block.
template <int kKeys, int kCols, bool kVector, bool kDelta>
class Preparer {
  static constexpr int kHalf = kKeys / 8;   // lanes that have q; as many have k
  static constexpr int kOwn = kKeys / 32;  // vector decays of a lane

 public:
  __device__ Preparer(const StateLaunch& launch, Shared<kKeys, kCols, kVector>& shared, int ring)
      : p(launch), s(shared.tokens[ring]), full(shared.token_full[ring]),
        empty(SharedAddress(&shared.token_empty[ring])), first(ring) {}

  __device__ void Run() {
    const int count = Work::Count(p, kCols);
    for (int n = first; Work::At(n) < count; n += kTokenWarps) {
      const Work work(p, kCols, n);
      const StateItem item = p.items[work.unit.item];
      for (int row = 0; row < item.rows; ++row) Prepare(work, item, row);
    }
  }

 private:
  __device__ __forceinline__ void Prepare(const Work& work, const StateItem& item, int row) {
    const int head = work.unit.head;
    const int64_t position = item.first_position + row;
    const int t = static_cast<int>(position % kTokens);
    const StateBlock block = BlockOf(p, item, head, position / kTokens);
    float x[8] = {}, v[8];  // q or k; v
    uint4 raw, raw_v;
    if (kind < 2) StateInput8(p, item, head, row, kind * kKeys + channel, x, raw);
    if (lane < kCols / 8) StateInput8(p, item, head, row, 2 * kKeys + work.first_column + 8 * lane, v, raw_v);
    const float* const gates = p.gates > 0 ? GatesOf(p, item, head, row) : nullptr;
    const float rate = p.token_rate ? gates[p.token_decay ? (kVector ? kKeys : 1) : 0] : 1.0f;
    float decay[kOwn], log_decay = 0;
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) decay[i] = RoundBF16(fmaxf(gates[lane + 32 * i], kLowestLogDecay));
    } else {
      log_decay = fmaxf(p.token_decay ? gates[0] : p.log_decay[item.first_head + head], kLowestLogDecay);
      FindDecays(block, row, t, log_decay);
    }
    Scale(x);
    const uint4 key = Round(x);
    const float own = Own(x);
    float fade[2], total = 1;
    if constexpr (!kVector) total = Fade(fade);

    WriteBlock(work, block, t, key, raw, raw_v, decay, log_decay);
    BarrierWait(empty, (count + 1) % 2);
    __syncwarp();
    Store(x, v, decay, fade);
    if (lane == 0) {
      s.total = total, s.rate = rate, s.own = own;
      s.skip = p.skip != nullptr ? p.skip[item.first_head + head] : 0.0f;
      s.t = t, s.last = row + 1 == item.rows, s.fresh = item.first_position < kTokens;
      s.block = FoundBlock::Of(block);
      s.value_row = block.Row(p.layout.values, t) + 2 * work.first_column;
      s.out = p.out + item.out_offset +
              2 * ((static_cast<int64_t>(row) * item.heads + head) * p.value_dim + work.first_column);
    }
    WarpArrive(full);
    ++count;
  }

  // Logarithms of the decays of the block's tokens, a lane two of them.
  __device__ __forceinline__ void FindDecays(const StateBlock& block, int row, int t, float log_decay) {
    if (t == 0) {
      low = high = 0;
    } else if (row == 0) {
      const auto* const decays = reinterpret_cast<const float*>(block.Row(p.layout.decays, 0));
      low = lane < t ? decays[lane] : 0.0f;
      high = lane + 32 < t ? decays[lane + 32] : 0.0f;
    }
    if (lane == t) low = log_decay;
    if (lane + 32 == t) high = log_decay;
  }
  __device__ __forceinline__ float Fade(float (&fade)[2]) const {
    float a = low, b = high;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more_a = __shfl_down_sync(~0u, a, step), more_b = __shfl_down_sync(~0u, b, step);
      if (lane + step < 32) a += more_a, b += more_b;
    }
    const float upper = __shfl_sync(~0u, b, 0), all = __shfl_sync(~0u, a, 0) + upper;
    const float after_a = __shfl_down_sync(~0u, a, 1), after_b = __shfl_down_sync(~0u, b, 1);
    fade[0] = __expf(upper + (lane < 31 ? after_a : 0.0f));
    fade[1] = __expf(lane < 31 ? after_b : 0.0f);
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

  __device__ __forceinline__ void WriteBlock(const Work& work, const StateBlock& block, int t, const uint4& key,
                                             const uint4& raw, const uint4& raw_v, const float (&decay)[kOwn],
                                             float log_decay) const {
    std::byte* const history = p.conv_width > 0 ? block.Row(p.layout.history, t) : nullptr;
    if (history != nullptr && lane < kCols / 8)
      *reinterpret_cast<uint4*>(history + 2 * (2 * kKeys + work.first_column + 8 * lane)) = raw_v;
    if (!work.first) return;
    if (history != nullptr && kind < 2) *reinterpret_cast<uint4*>(history + 2 * (kind * kKeys + channel)) = raw;
    if (kind == 1) *reinterpret_cast<uint4*>(block.Row(p.layout.keys, t) + 2 * channel) = key;
    if constexpr (kVector) {
      auto* const to = reinterpret_cast<__nv_bfloat16*>(block.Row(p.layout.decays, t));
#pragma unroll
      for (int i = 0; i < kOwn; ++i) to[lane + 32 * i] = __float2bfloat16_rn(decay[i]);
    } else if (lane == 0) {
      reinterpret_cast<float*>(block.Row(p.layout.decays, 0))[t] = log_decay;
    }
  }

  __device__ __forceinline__ void Store(const float (&x)[8], const float (&v)[8], const float (&decay)[kOwn],
                                        const float (&fade)[2]) {
    const auto put = [](float* to, const float (&from)[8]) {
      reinterpret_cast<float4*>(to)[0] = {from[0], from[1], from[2], from[3]};
      reinterpret_cast<float4*>(to)[1] = {from[4], from[5], from[6], from[7]};
    };
    if (kind < 2) put((kind == 0 ? s.q : s.k) + channel, x);
    if (lane < kCols / 8) put(s.v + 8 * lane, v);
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) s.decay[lane + 32 * i] = decay[i];
    } else {
      s.fade[lane] = fade[0], s.fade[lane + 32] = fade[1];
    }
  }

  const StateLaunch& p;
  Token<kKeys, kCols, kVector>& s;
  uint64_t& full;
  const uint32_t empty;
  const int first;
  uint32_t count = 0;         // of tokens so far
  float low = 0, high = 0;  // logarithms of decays of tokens lane and lane + 32
  const int lane = threadIdx.x % 32, kind = lane / kHalf, channel = lane % kHalf * 8;  // kind: 0 q, 1 k
};

#endif

}  // namespace dovetail::kernels::cuda::decode
