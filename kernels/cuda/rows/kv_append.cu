#include <cuda_fp8.h>

#include "kernels/cuda/exchange/exchange.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/append_launches.h"

namespace dovetail::kernels::cuda {
namespace {

// One of a row's heads: q's, then k's, then v's.
struct HeadTask {
  const void* source = nullptr;  // elements from `from` on
  int64_t from = 0;
  void* out = nullptr;  // where it goes as it is, from element `to` on; null: into a KvBlock
  int64_t to = 0;
  std::byte* block = nullptr;
  int token = 0;  // of the block
  int dim = 0;    // 0: there is no such head
  bool is_q = false, is_v = false;
};

// Reads only what no kernel right before this one writes.
__device__ __forceinline__ HeadTask TaskOf(const KvAppendLaunch& p, int row, int head) {
  HeadTask task;
  if (head >= p.q_heads + 2 * p.kv_heads) return task;
  task.is_q = head < p.q_heads;
  task.is_v = head >= p.q_heads + p.kv_heads;
  task.dim = task.is_v ? p.layout.value_dim : p.layout.key_dim;
  const int kv_head = head - p.q_heads - (task.is_v ? p.kv_heads : 0);
  task.source = p.qkv;
  task.from = row * p.qkv_step + static_cast<int64_t>(head) * task.dim;
  if (task.is_v && p.v != nullptr) {
    task.source = p.v;
    task.from = row * p.v_step + static_cast<int64_t>(kv_head) * task.dim;
  } else if (task.is_v) {
    task.from = row * p.qkv_step + static_cast<int64_t>(p.q_heads + p.kv_heads) * p.layout.key_dim +
                static_cast<int64_t>(kv_head) * task.dim;
  }
  void *q_out = p.q_out, *k_out = p.k_out, *v_out = p.v_out;
  int64_t out_row = row;
  if (p.fan != nullptr) {
    const ExchangeRow to = p.fan_rows[row];
    const ExchangePeer& peer = p.fan->peers[to.peer];
    out_row = to.row;
    q_out = peer.query;
    k_out = peer.key_value;
    v_out = static_cast<std::byte*>(peer.key_value) + peer.rows * p.k_out_step * (p.type == WireType::kF32 ? 4 : 2);
  }
  if (task.is_q) {
    task.out = q_out;
    task.to = out_row * p.q_out_step + static_cast<int64_t>(head) * task.dim;
  } else if (k_out != nullptr) {
    task.out = task.is_v ? v_out : k_out;
    task.to = out_row * (task.is_v ? p.v_out_step : p.k_out_step) + static_cast<int64_t>(kv_head) * task.dim;
  } else {
    const DeviceAttentionItem& item = p.items[p.row_items[row]];
    const int position = p.positions[row], segment = position / CudaKvLayout::kTokens - item.first_segment;
    task.token = position % CudaKvLayout::kTokens;
    task.block = const_cast<std::byte*>(item.blocks[kv_head * item.head_step + segment]) + p.kv_offset;
  }
  return task;
}

__device__ __forceinline__ void StoreKv(KvType type, std::byte* at, float x) {
  if (type == KvType::kBF16) {
    *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(x);
  } else if (type == KvType::kF16) {
    *reinterpret_cast<__half*>(at) = __float2half_rn(x);
  } else {
    *reinterpret_cast<__nv_fp8_storage_t*>(at) = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }
}

constexpr int kAppendWarps = 4;

// Heads of any size and rotation: one warp a (row, head).
__device__ void AppendHead(const KvAppendLaunch& p) {
  __shared__ float vectors[kAppendWarps][256];
  float* x = vectors[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, row = blockIdx.y;
  LetSuccessorBegin();
  // What does not come from the kernel before is under way when that ends.
  const HeadTask task = TaskOf(p, row, blockIdx.x * kAppendWarps + threadIdx.x / 32);
  const int dim = task.dim;
  if (dim == 0) return WaitForPredecessor();
  const bool rotates = !task.is_v && p.cos != nullptr && p.rotary > 0;
  const int half = p.rotary / 2;
  float cosine[4], sine[4];  // of pairs lane, lane + 32, ...
  if (rotates) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = static_cast<int64_t>(row) * half + min(lane + 32 * j, half - 1);
      cosine[j] = p.cos[at];
      sine[j] = p.sin[at];
    }
  }
  WaitForPredecessor();
  float squares = 0;
  for (int i = 2 * lane; i < dim; i += 64) {
    const float2 v = LoadWirePair(p.type, task.source, task.from + i);
    x[i] = v.x;
    x[i + 1] = v.y;
    squares += v.x * v.x + v.y * v.y;
  }
  const float* norm = task.is_v ? nullptr : task.is_q ? p.q_norm : p.k_norm;
  __syncwarp();
  if (norm != nullptr) {
    const float inverse = rsqrtf(WarpSum(squares) / static_cast<float>(dim) + p.norm_eps);
    for (int i = lane; i < dim; i += 32) x[i] *= inverse * norm[i];
    __syncwarp();
  }
  if (rotates) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[j] - b * sine[j];
      x[i + half] = b * cosine[j] + a * sine[j];
    }
    __syncwarp();
  }
  if (task.out != nullptr) {
    for (int i = 2 * lane; i < dim; i += 64) StoreWirePair(p.type, task.out, task.to + i, x[i], x[i + 1]);
    return;
  }
  const float scale = task.is_v ? p.value_scale : p.key_scale;
  if (task.is_v) {
    for (int i = lane; i < dim; i += 32)
      StoreKv(p.layout.type, task.block + p.layout.value_offset(task.token, i), x[i] / scale);
    return;
  }
  const int padded = p.layout.key_row_bytes() / p.layout.element_bytes();
  for (int i = lane; i < padded; i += 32)
    StoreKv(p.layout.type, task.block + p.layout.key_offset(task.token, i), i < dim ? x[i] / scale : 0.0f);
}

constexpr int kRun = 8, kRunThreads = 256;

// Lanes that share a head, one a run of it or of its padding: a power of two.
__host__ __device__ constexpr int LanesOfHead(const CudaKvLayout& layout) {
  const int padded = layout.key_row_bytes() / layout.element_bytes();
  const int most = padded > layout.value_dim ? padded : layout.value_dim;
  int lanes = 1;
  while (lanes * kRun < most) lanes *= 2;
  return lanes;
}

// Elements [i, i + 8) of a key or a value.
__device__ __forceinline__ void StoreRun(const KvAppendLaunch& p, const HeadTask& task, int i, float (&x)[kRun]) {
  const float scale = task.is_v ? p.value_scale : p.key_scale;
  if (scale != 1) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) x[j] /= scale;
  }
  const CudaKvLayout& layout = p.layout;
  if (layout.type == KvType::kE4M3 && task.is_v) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) StoreKv(KvType::kE4M3, task.block + layout.value_offset(task.token, i + j), x[j]);
    return;
  }
  std::byte* at = task.block + (task.is_v ? layout.value_offset(task.token, i) : layout.key_offset(task.token, i));
  if (layout.type != KvType::kE4M3)
    return StoreWire8(layout.type == KvType::kBF16 ? WireType::kBF16 : WireType::kF16, at, 0, x);
  uint32_t pairs[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    pairs[j] = __nv_cvt_float2_to_fp8x2(make_float2(x[2 * j], x[2 * j + 1]), __NV_SATFINITE, __NV_E4M3);
  *reinterpret_cast<uint2*>(at) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Heads whose rotated halves are whole runs of eight elements: a run a thread, in registers from end to end.
__device__ void AppendRun(const KvAppendLaunch& p) {
  const int lanes = LanesOfHead(p.layout), row = blockIdx.y, half = p.rotary / 2;
  const int thread = blockIdx.x * kRunThreads + threadIdx.x, i = kRun * (thread % lanes);
  LetSuccessorBegin();
  const HeadTask task = TaskOf(p, row, thread / lanes);
  const bool there = i < task.dim, is_low = i < half;
  const bool rotates = there && !task.is_v && p.cos != nullptr && i < p.rotary;
  float cosine[kRun], sine[kRun];
  if (rotates) {
    const int64_t at = static_cast<int64_t>(row) * half + (is_low ? i : i - half);
    LoadWire8(WireType::kF32, p.cos, at, cosine);
    LoadWire8(WireType::kF32, p.sin, at, sine);
  }
  WaitForPredecessor();
  float x[kRun] = {};
  if (there) LoadWire8(p.type, task.source, task.from + i, x);
  if (p.q_norm != nullptr || p.k_norm != nullptr) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kRun; ++j) squares += x[j] * x[j];
    for (int step = lanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float* norm = task.is_v ? nullptr : task.is_q ? p.q_norm : p.k_norm;
    if (there && norm != nullptr) {
      const float inverse = rsqrtf(squares / static_cast<float>(task.dim) + p.norm_eps);
      float weight[kRun];
      LoadWire8(WireType::kF32, norm, i, weight);
#pragma unroll
      for (int j = 0; j < kRun; ++j) x[j] *= inverse * weight[j];
    }
  }
  if (p.cos != nullptr) {
    const int partner = static_cast<int>(threadIdx.x % 32) + (is_low ? half : -half) / kRun;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float other = __shfl_sync(~0u, x[j], partner);
      if (rotates) x[j] = is_low ? x[j] * cosine[j] - other * sine[j] : x[j] * cosine[j] + other * sine[j];
    }
  }
  if (task.dim == 0) return;
  if (task.out != nullptr) {
    if (there) StoreWire8(p.type, task.out, task.to + i, x);
  } else if (there || (!task.is_v && i * p.layout.element_bytes() < p.layout.key_row_bytes())) {
    StoreRun(p, task, i, x);
  }
}

template <void (*kAppend)(const KvAppendLaunch&)>
__device__ __forceinline__ void AppendAndTell(const KvAppendLaunch& p) {
  bool came = true;
  if (p.await_op >= 0)
    came = __syncthreads_and(threadIdx.x != 0 || ExchangeAwait(p.exchange, static_cast<uint32_t>(p.await_op)));
  // What comes of a failed step belongs nowhere: its blocks may already be another sequence's.
  const bool sends = p.signal_op >= 0;
  const bool first = sends && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0;
  TurnOf turn;
  if (first) turn = LoadTurn(p.fan != nullptr ? p.fan->peers[0].end.own : p.exchange.own);
  if (came) kAppend(p);
  // The products before this have ended: the next step may begin with its own while this one's messages leave.
  if (first) GiveTurn(turn);
  if (!sends) return;
  const auto op = static_cast<uint32_t>(p.signal_op);
  const uint32_t blocks = gridDim.x * gridDim.y;
  if (p.fan != nullptr) return ExchangeSignalAllWhenLast(*p.fan, op, blocks);
  ExchangeSignalWhenLast(p.exchange, op, blocks);
}

__global__ void __launch_bounds__(kAppendWarps * 32) KvAppendKernel(const __grid_constant__ KvAppendLaunch p) {
  AppendAndTell<AppendHead>(p);
}

__global__ void __launch_bounds__(kRunThreads) KvAppendRunsKernel(const __grid_constant__ KvAppendLaunch p) {
  AppendAndTell<AppendRun>(p);
}

// What a fan names is aligned, as its memory is.
bool InWholeRuns(const KvAppendLaunch& p) {
  return p.type != WireType::kF32 && p.rotary % (2 * kRun) == 0 &&
         InRuns({p.qkv_step, p.v_step, p.q_out_step, p.k_out_step, p.v_out_step, p.kv_offset},
                {p.qkv, p.v, p.q_out, p.k_out, p.v_out, p.q_norm, p.k_norm, p.cos, p.sin});
}

}  // namespace

int LaunchKvAppend(const KvAppendLaunch* launch, void* stream) {
  if (launch->rows == 0) return 0;
  const int heads = launch->q_heads + 2 * launch->kv_heads;
  const auto s = static_cast<cudaStream_t>(stream);
  if (InWholeRuns(*launch)) {
    const dim3 runs((heads * LanesOfHead(launch->layout) + kRunThreads - 1) / kRunThreads, launch->rows);
    return LaunchDependent(KvAppendRunsKernel, runs, kRunThreads, 0, s, *launch);
  }
  const dim3 grid((heads + kAppendWarps - 1) / kAppendWarps, launch->rows);
  return LaunchDependent(KvAppendKernel, grid, kAppendWarps * 32, 0, s, *launch);
}

}  // namespace dovetail::kernels::cuda
