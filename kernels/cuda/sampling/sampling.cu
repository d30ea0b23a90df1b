#include <climits>

#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/sampling/sampling_launches.h"

namespace dovetail::kernels::cuda {
namespace {

// One thread block a row, as sampling.h orders it. Every sum that decides something is an integer sum, so that a draw
// does not depend on the order in which threads add.

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr double kMassUnit = 68719476736.0;  // 2^36: exp(z) <= 1, and 2^24 ids

struct Shared {
  unsigned long long bins[kBins];
  unsigned long long wide[32];
  float values[32];
  int ids[32];
  unsigned long long total;
  uint32_t bin;
  float value;
  int id;
};

// Larger floats have larger keys. Never of a NaN.
__device__ __forceinline__ uint32_t KeyOf(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Best {
  float value = -INFINITY;
  int id = INT_MAX;
  __device__ __forceinline__ void Take(float v, int i) {
    if (v > value || (v == value && i < id)) value = v, id = i;
  }
};

__device__ Best BlockBest(Best mine, Shared& shared) {
  for (int step = 16; step > 0; step /= 2) {
    const float v = __shfl_xor_sync(~0u, mine.value, step);
    const int i = __shfl_xor_sync(~0u, mine.id, step);
    mine.Take(v, i);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.values[threadIdx.x / 32] = mine.value, shared.ids[threadIdx.x / 32] = mine.id;
  __syncthreads();
  if (threadIdx.x < 32) {
    Best all{shared.values[threadIdx.x], shared.ids[threadIdx.x]};
    for (int step = 16; step > 0; step /= 2) {
      const float v = __shfl_xor_sync(~0u, all.value, step);
      const int i = __shfl_xor_sync(~0u, all.id, step);
      all.Take(v, i);
    }
    if (threadIdx.x == 0) shared.value = all.value, shared.id = all.id;
  }
  __syncthreads();
  return {shared.value, shared.id};
}

__device__ unsigned long long BlockSum(unsigned long long mine, Shared& shared) {
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.wide[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) {
    unsigned long long all = shared.wide[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
    if (threadIdx.x == 0) shared.total = all;
  }
  __syncthreads();
  return shared.total;
}

// One warp: the bin, from the last one down, in which the running sum reaches `target`, and the sum before it.
__device__ void FindBin(unsigned long long target, int bins, Shared& shared) {
  const int per_lane = bins / 32, lane = threadIdx.x, last = bins - 1 - lane * per_lane;  // lane 0 has the last bins
  unsigned long long mine = 0;
  for (int i = 0; i < per_lane; ++i) mine += shared.bins[last - i];
  unsigned long long up_to = mine;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, up_to, step);
    if (lane >= step) up_to += other;
  }
  const uint32_t reached = __ballot_sync(~0u, up_to >= target);
  const int who = reached != 0 ? __ffs(reached) - 1 : 31;
  if (lane != who) return;
  unsigned long long sum = up_to - mine;
  int bin = last;
  for (; bin > last - per_lane + 1 && sum + shared.bins[bin] < target; --bin) sum += shared.bins[bin];
  shared.total = sum;
  shared.bin = bin;
}

// The largest key such that the weights of all keys at or above it reach `target` (> 0), and what those above it
// weigh. Entries without a weight do not count. Each(visit) calls visit(key, weight) for this thread's entries.
template <typename Each>
__device__ uint32_t SelectKey(unsigned long long target, unsigned long long& above, Shared& shared, Each&& each) {
  uint32_t prefix = 0;
  above = 0;
  for (int shift = 21, bits = 11; shift >= 0;) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
    const uint32_t mask = (1u << bits) - 1, seen_mask = shift + bits == 32 ? 0u : ~0u << (shift + bits);
    each([&](uint32_t key, unsigned long long weight) {
      if ((key & seen_mask) == prefix && weight > 0) atomicAdd(&shared.bins[(key >> shift) & mask], weight);
    });
    __syncthreads();
    if (threadIdx.x < 32) FindBin(target - above, static_cast<int>(mask) + 1, shared);
    __syncthreads();
    above += shared.total;
    prefix |= shared.bin << shift;
    if (shift == 0) break;
    shift = shift == 21 ? 10 : 0;
    bits = shift == 10 ? 11 : 10;
    __syncthreads();
  }
  __syncthreads();
  return prefix;
}

// Philox 4x32-10 (Salmon et al. 2011): all four words.
__device__ __forceinline__ uint4 Philox(uint32_t c0, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  uint32_t c1 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// To about 1e-5, on both sides of v = (word + 0.5) / 2^32.
__device__ __forceinline__ float FastNoise(uint32_t word) {
  const float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f, rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;
  return -logf(word < 0x80000000u ? -log1pf(-v) : -logf(rest));
}

__device__ __forceinline__ double ExactNoise(uint32_t word) {
  const double v = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -log(-log1p(-v));
}

// Which ids are left after min_p, top_k and top_p: those with a larger key than `key`, and of those with that key the
// ids <= last_id.
struct Cut {
  uint32_t key = 0;
  int last_id = INT_MAX;
  __device__ __forceinline__ bool Keeps(float z, int id) const {
    const uint32_t k = KeyOf(z);
    return k > key || (k == key && id <= last_id);
  }
};

struct Row {
  const float* logits;  // biased and penalised
  int vocab;
  float top;
  float inverse_temperature;
  __device__ __forceinline__ float Z(int id) const { return (logits[id] - top) * inverse_temperature; }
};

__device__ Cut FindCut(const SampleParams& p, const Row& row, Shared& shared) {
  Cut cut{KeyOf(-INFINITY) + 1, INT_MAX};
  if (p.min_p > 0) cut.key = max(cut.key, KeyOf(logf(p.min_p)));
  unsigned long long above;
  if (p.top_k > 0 && p.top_k < row.vocab) {
    unsigned long long mine = 0;
    for (int id = threadIdx.x; id < row.vocab; id += kThreads) mine += KeyOf(row.Z(id)) >= cut.key;
    if (BlockSum(mine, shared) > static_cast<unsigned long long>(p.top_k)) {
      cut.key = SelectKey(p.top_k, above, shared, [&](auto&& visit) {
        for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
          const uint32_t key = KeyOf(row.Z(id));
          visit(key, key >= cut.key ? 1 : 0);
        }
      });
    }
  }
  if (p.top_p >= 1) return cut;
  const uint32_t floor = cut.key;
  const auto mass = [&](float z) { return static_cast<unsigned long long>(exp(static_cast<double>(z)) * kMassUnit); };
  unsigned long long mine = 0;
  for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
    const float z = row.Z(id);
    if (KeyOf(z) >= floor) mine += mass(z);
  }
  const unsigned long long total = BlockSum(mine, shared);
  const auto target = max(1ull, static_cast<unsigned long long>(ceil(static_cast<double>(total) * p.top_p)));
  cut.key = SelectKey(target, above, shared, [&](auto&& visit) {
    for (int id = threadIdx.x; id < row.vocab; id += kThreads) {
      const float z = row.Z(id);
      const uint32_t key = KeyOf(z);
      visit(key, key >= floor ? mass(z) : 0);
    }
  });
  // Of equal values at the boundary, the lowest ids that are needed.
  const uint32_t bits = cut.key & 0x80000000u ? cut.key & 0x7fffffffu : ~cut.key;
  const unsigned long long each_mass = max(1ull, mass(__uint_as_float(bits)));
  const unsigned long long needed = (target - above + each_mass - 1) / each_mass;
  const uint32_t id_key = SelectKey(needed, above, shared, [&](auto&& visit) {
    for (int id = threadIdx.x; id < row.vocab; id += kThreads)
      visit(~static_cast<uint32_t>(id), KeyOf(row.Z(id)) == cut.key ? 1 : 0);
  });
  cut.last_id = static_cast<int>(~id_key);
  return cut;
}

__device__ int Draw(const SampleParams& p, const Row& row, const Cut& cut, Shared& shared) {
  Best best;
  for (int block = threadIdx.x; block < (row.vocab + 63) / 64 * 16; block += kThreads) {
    const int first = block / 16 * 64 + block % 16;
    const uint4 words = Philox(block, p.position, 0, p.seed_low, p.seed_high);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int id = first + 16 * i;
      if (id >= row.vocab) continue;
      const float z = row.Z(id);
      if (cut.Keeps(z, id)) best.Take(z + FastNoise(word[i]), id);
    }
  }
  best = BlockBest(best, shared);
  // The winner among those that rounding could have put on top, in double.
  const float margin = 1e-3f + 1e-6f * fabsf(best.value);
  double top = -INFINITY;
  int top_id = INT_MAX;
  for (int block = threadIdx.x; block < (row.vocab + 63) / 64 * 16; block += kThreads) {
    const int first = block / 16 * 64 + block % 16;
    const uint4 words = Philox(block, p.position, 0, p.seed_low, p.seed_high);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    for (int i = 0; i < 4; ++i) {
      const int id = first + 16 * i;
      if (id >= row.vocab) continue;
      const float z = row.Z(id);
      if (!cut.Keeps(z, id) || z + FastNoise(word[i]) < best.value - margin) continue;
      const double score = z + ExactNoise(word[i]);
      if (score > top || (score == top && id < top_id)) top = score, top_id = id;
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    const double v = __shfl_xor_sync(~0u, top, step);
    const int i = __shfl_xor_sync(~0u, top_id, step);
    if (v > top || (v == top && i < top_id)) top = v, top_id = i;
  }
  __syncthreads();
  auto* tops = reinterpret_cast<double*>(shared.bins);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, shared.ids[threadIdx.x / 32] = top_id;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / 32; ++i) {
      if (tops[i] > top || (tops[i] == top && shared.ids[i] < top_id)) top = tops[i], top_id = shared.ids[i];
    }
    shared.id = top_id;
  }
  __syncthreads();
  return shared.id;
}

// Copies the row and applies bans, biases and penalties in sampling.h's order.
__device__ void ApplyChanges(const SampleLaunch& launch, const SampleParams& p, const float* logits, float* work) {
  for (int id = threadIdx.x; id < launch.vocab; id += kThreads) work[id] = p.allowed > 0 ? -INFINITY : logits[id];
  __syncthreads();
  for (int i = threadIdx.x; i < p.allowed; i += kThreads) {
    const int id = launch.allowed[p.first_allowed + i];
    work[id] = logits[id];
  }
  __syncthreads();
  // A token may be both banned and biased: one thread keeps the order.
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.biases; ++i) {
      const SampleBias bias = launch.biases[p.first_bias + i];
      work[bias.token] += bias.bias;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.seen; i += kThreads) {
    const SampleSeen seen = launch.seen[p.first_seen + i];
    float x = work[seen.token];
    x = x > 0 ? x / p.repetition_penalty : x * p.repetition_penalty;
    if (seen.generated > 0) {
      x -= p.frequency_penalty * static_cast<float>(seen.generated);
      x -= p.presence_penalty;
    }
    work[seen.token] = x;
  }
  __syncthreads();
}

__device__ void FillLogprob(const float* logits, int vocab, float raw_top, SampleOutput& out, Shared& shared) {
  unsigned long long mass = 0, rank = 0;
  const float chosen = logits[out.token];
  for (int id = threadIdx.x; id < vocab; id += kThreads) {
    mass += static_cast<unsigned long long>(exp(static_cast<double>(logits[id] - raw_top)) * kMassUnit);
    rank += logits[id] >= chosen;
  }
  const unsigned long long all = BlockSum(mass, shared);
  out.rank = static_cast<int32_t>(BlockSum(rank, shared));
  out.logprob = static_cast<float>(static_cast<double>(chosen) - raw_top - log(static_cast<double>(all) / kMassUnit));
}

__global__ void __launch_bounds__(kThreads) SampleKernel(const __grid_constant__ SampleLaunch launch) {
  __shared__ Shared shared;
  const SampleParams p = launch.params[blockIdx.x];
  const float* logits = launch.logits + blockIdx.x * launch.step;
  SampleOutput out;
  Best raw;
  bool bad = false;
#pragma unroll 8
  for (int id = threadIdx.x; id < launch.vocab; id += kThreads) {
    const float x = logits[id];
    bad |= isnan(x) || x == INFINITY;
    raw.Take(x, id);
  }
  bad = __syncthreads_or(bad);
  raw = BlockBest(raw, shared);
  Best top = raw;
  const float* z = logits;
  if (p.biases > 0 || p.seen > 0 || p.allowed > 0) {
    float* work = launch.work + blockIdx.x * launch.work_step;
    ApplyChanges(launch, p, logits, work);
    z = work;
    top = Best();
    for (int id = threadIdx.x; id < launch.vocab; id += kThreads) top.Take(z[id], id);
    top = BlockBest(top, shared);
  }
  if (bad || raw.value == -INFINITY) {
    out.error = 1;
  } else if (top.value == -INFINITY) {
    out.error = 2;
  } else if (p.inverse_temperature == 0) {
    out.token = top.id;
  } else {
    const Row row{z, launch.vocab, top.value, p.inverse_temperature};
    out.token = Draw(p, row, FindCut(p, row, shared), shared);
  }
  if (out.error == 0 && p.logprob != 0) FillLogprob(logits, launch.vocab, raw.value, out, shared);
  if (threadIdx.x != 0) return;
  launch.out[blockIdx.x] = out;
  if (launch.host_out != nullptr) launch.host_out[blockIdx.x] = out;
}

}  // namespace

int LaunchSample(const SampleLaunch* launch, void* stream) {
  if (launch->rows == 0) return 0;
  SampleKernel<<<launch->rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace dovetail::kernels::cuda
