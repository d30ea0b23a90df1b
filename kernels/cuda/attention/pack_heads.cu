#include "kernels/cuda/attention/pack_heads_args.h"
#include "kernels/cuda/primitives/enqueue.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kPackThreads = 256;
constexpr int kPackInFlight = 4;  // loads of a thread
constexpr int kRunElements = 8;   // 16 bytes

// Where run `run` (of a padded head) of head `head` of tensor `tensor` of a row goes.
__device__ __forceinline__ int4* PlaceOf(const PackHeadsLaunch& p, uint32_t row, uint32_t tensor, uint32_t head,
                                         uint32_t run) {
  const uint32_t width = p.layout.key_dim, element = run * kRunElements;
  if (tensor == 0) {
    const int64_t at = (static_cast<int64_t>(row) * p.heads + head) * width + element;
    return reinterpret_cast<int4*>(static_cast<uint16_t*>(p.q) + at);
  }
  const uint32_t by = p.by_token != 0 ? p.sequences : p.length, outer = row / by, inner = row - outer * by;
  const uint32_t sequence = p.by_token != 0 ? inner : outer, token = p.by_token != 0 ? outer : inner;
  const int64_t segments = (p.length + CudaKvLayout::kTokens - 1) / CudaKvLayout::kTokens;
  const int64_t block = (static_cast<int64_t>(sequence) * p.heads + head) * segments + token / CudaKvLayout::kTokens;
  const int in_block = token % CudaKvLayout::kTokens;
  const int byte = tensor == 1 ? p.layout.key_offset(in_block, element) : p.layout.value_offset(in_block, element);
  return reinterpret_cast<int4*>(static_cast<char*>(p.blocks) + block * p.block_step + byte);
}

// Neighbouring threads have neighbouring 16 bytes of a row.
__global__ void __launch_bounds__(kPackThreads) PackHeadsKernel(const __grid_constant__ PackHeadsLaunch p) {
  const uint32_t of_head = p.layout.key_dim / kRunElements, of_tensor = of_head * p.heads;
  const uint32_t first_tensor = p.q != nullptr ? 0 : 1, of_row = (3 - first_tensor) * of_tensor;
  const uint32_t count = of_row * p.sequences * p.length, step = gridDim.x * kPackThreads;
  const auto* source = static_cast<const uint16_t*>(p.source);
  const uint32_t begin = blockIdx.x * kPackThreads + threadIdx.x;
  for (uint32_t first = begin; first < count; first += kPackInFlight * step) {
    int4 held[kPackInFlight];
    int4* places[kPackInFlight];
#pragma unroll
    for (int j = 0; j < kPackInFlight; ++j) {
      const uint32_t i = first + j * step;
      if (i >= count) continue;
      const uint32_t row = i / of_row, in_row = i - row * of_row, head = in_row / of_head;  // through all tensors
      const uint32_t run = in_row - head * of_head, tensor = first_tensor + head / p.heads;
      places[j] = PlaceOf(p, row, tensor, head % p.heads, run);
      const int64_t from = row * p.row_step + (first_tensor * p.heads + head) * static_cast<int64_t>(p.head_step);
      held[j] = make_int4(0, 0, 0, 0);
      if (static_cast<int>(run * kRunElements) < p.dim)
        held[j] = __ldcg(reinterpret_cast<const int4*>(source + from + run * kRunElements));
    }
#pragma unroll
    for (int j = 0; j < kPackInFlight; ++j)
      if (first + j * step < count) *places[j] = held[j];
  }
}

}  // namespace

int LaunchPackHeads(const PackHeadsLaunch* launch, void* stream) {
  constexpr int64_t kMostBlocks = 1 << 15;
  const int64_t runs = int64_t{launch->layout.key_dim} / kRunElements * launch->heads * (launch->q != nullptr ? 3 : 2);
  const int64_t count = runs * launch->sequences * launch->length;
  if (count == 0) return 0;
  const int64_t needed = BlocksOf(count, kPackThreads * kPackInFlight);
  const auto blocks = static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
  PackHeadsKernel<<<blocks, kPackThreads, 0, AsStream(stream)>>>(*launch);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
