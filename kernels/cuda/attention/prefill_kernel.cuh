#pragma once
#include "kernels/cuda/attention/prefill_producers.cuh"
#include "kernels/cuda/attention/prefill_rows.cuh"
#include "kernels/cuda/attention/prefill_shape.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

// Attention of many rows over paged KV on Hopper (paged_attention.h says what is computed), after FlashAttention-3
// (arXiv:2407.08608). A thread block takes one tile after the other: 128 (token, head) rows of one KV head, two
// warpgroups with 64 each. They go through the keys from the last to the first, so that masks are met first, in steps
// of two KvBlocks (of one where heads have 256 dimensions). While a warpgroup weighs the scores of a step, its tensor
// cores multiply the weights of the step before with values, and the other warpgroup's products run: the two take
// turns.
//
// Of the third warpgroup, one warp copies blocks and three copy queries, two tiles ahead. A row of K or V lies in a
// block as wgmma reads it, except for the pitch: the tensor map cuts rows into columns of 128, 64 or 32 bytes and puts
// these one below the other. Behind the last token it fills in zeros, whatever the block's memory holds.
//
// A tile is not divided between thread blocks, unless there are so few that they would leave most of the
// multiprocessors idle (prefill_plan.h): then each thread block has some of its blocks, and prefill_join.cu joins the
// pieces in the order of the blocks. So a tile's bits depend on its rows, its keys and the division only.

namespace dovetail::kernels::cuda {

#if __CUDA_ARCH_FEAT_SM90_ALL

// Between the two warpgroups: whose products come next.
__device__ __forceinline__ void AwaitTurn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void PassTurn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group ^ 1)) : "memory");
}

// Scores of a tile's first step.
template <typename S>
__device__ __forceinline__ void FirstStep(const PrefillLaunch& p, const PrefillShared<S>& shared, uint32_t queries,
                                          int token0, typename Pipeline<S::kStages>::State& key_state,
                                          PrefillRowsState<S>& rows) {
  shared.key_ring.ConsumerWait(key_state);
  FenceRegisters(rows.s);
  BeginProducts();
  rows.IssueScores(queries, shared.keys + key_state.stage * S::kStepBytes);
  EndProducts();
  WaitForProducts<0>();
  FenceRegisters(rows.s);
  shared.key_ring.ConsumerRelease(key_state);
  key_state.Next();
  float factor[2];
  rows.Mask(token0);
  rows.Weigh(p.scale_log2, factor);
  rows.PackWeights();
}

// Scores of a further step, and the values of the one before.
template <typename S>
__device__ __forceinline__ void NextStep(const PrefillLaunch& p, const PrefillShared<S>& shared, int group,
                                         uint32_t queries, int token0, typename Pipeline<S::kStages>::State& key_state,
                                         typename Pipeline<S::kStages>::State& value_state, PrefillRowsState<S>& rows) {
  shared.key_ring.ConsumerWait(key_state);
  AwaitTurn(group);
  FenceRegisters(rows.s);
  FenceRegisters(rows.o);
  FenceRegisters(rows.w);
  BeginProducts();
  rows.IssueScores(queries, shared.keys + key_state.stage * S::kStepBytes);
  EndProducts();
  shared.value_ring.ConsumerWait(value_state);
  BeginProducts();
  rows.IssueValues(shared.values + value_state.stage * S::kStepBytes);
  EndProducts();
  PassTurn(group);
  WaitForProducts<1>();
  FenceRegisters(rows.s);
  shared.key_ring.ConsumerRelease(key_state);
  key_state.Next();
  float factor[2];
  rows.Mask(token0);
  const bool changes = rows.Weigh(p.scale_log2, factor);
  FenceRegisters(rows.s);
  // As a branch: where there is none, the assembler waits for products before it begins to weigh scores.
  if (changes) {
    WaitForProducts<0>();
    FenceRegisters(rows.o);
    rows.Scale(factor);
  }
  WaitForProducts<0>();
  FenceRegisters(rows.o);
  FenceRegisters(rows.w);
  shared.value_ring.ConsumerRelease(value_state);
  value_state.Next();
  rows.PackWeights();
}

template <typename S>
__device__ __forceinline__ void LastValues(const PrefillShared<S>& shared,
                                           typename Pipeline<S::kStages>::State& value_state,
                                           PrefillRowsState<S>& rows) {
  shared.value_ring.ConsumerWait(value_state);
  FenceRegisters(rows.o);
  FenceRegisters(rows.w);
  BeginProducts();
  rows.IssueValues(shared.values + value_state.stage * S::kStepBytes);
  EndProducts();
  WaitForProducts<0>();
  FenceRegisters(rows.o);
  shared.value_ring.ConsumerRelease(value_state);
  value_state.Next();
}

inline constexpr int kFixedPieceTokens = kFixedPieceBlocks * CudaKvLayout::kTokens;

// The thread block's, of PrefillLaunch::fold.
template <typename S>
__device__ __forceinline__ float4* FoldMemory(const PrefillLaunch& p) {
  return reinterpret_cast<float4*>(p.fold + blockIdx.x * PrefillFoldBytes(S::kDim));
}

// One of the attending warpgroups. What a tile needs is in variables, and not in members of one value: the compiler
// then keeps what describes matrices from step to step.
template <typename S>
__device__ __forceinline__ void Attend(const PrefillLaunch& p, const PrefillShared<S>& shared, int group) {
  const int my_row = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  typename Pipeline<S::kQueryStages>::State query_state;
  typename Pipeline<S::kStages>::State key_state, value_state;
  PrefillRowsState<S> rows;
  if (group == 1) PassTurn(group);
  for (int number = 0;; ++number) {
    shared.query_ring.ConsumerWait(query_state);
    const PrefillSlot& slot = shared.slots[number % kSlots];
    const int segments = slot.tile.segments;
    if (segments < 0) return;
    const int absent = slot.tile.absent;
    const int row = slot.tile.row0 + my_row;
    rows.Begin(p, slot, row);
    const uint32_t queries = shared.queries + query_state.stage * S::kQueryBytes + group * 64 * S::kSlab;
    const int steps = (absent + segments + S::kBlocks - 1) / S::kBlocks;
    int token0 = (slot.tile.first_segment - absent) * CudaKvLayout::kTokens + (steps - 1) * S::kKeys;
    bool has_folded = false;
    if (steps > 0) {
      FirstStep<S>(p, shared, queries, token0, key_state, rows);
      for (int step = 1; step < steps; ++step) {
        const bool ends_piece = S::kFolds && token0 % kFixedPieceTokens == 0;
        token0 -= S::kKeys;
        if (ends_piece) {
          LastValues<S>(shared, value_state, rows);
          rows.Fold(FoldMemory<S>(p), !has_folded, /*is_last=*/false);
          rows.BeginPiece();
          has_folded = true;
          FirstStep<S>(p, shared, queries, token0, key_state, rows);
        } else {
          NextStep<S>(p, shared, group, queries, token0, key_state, value_state, rows);
        }
      }
    }
    shared.query_ring.ConsumerRelease(query_state);
    query_state.Next();
    if (steps > 0) LastValues<S>(shared, value_state, rows);
    if (S::kFolds && has_folded) rows.Fold(FoldMemory<S>(p), /*is_first=*/false, /*is_last=*/true);
    rows.Write(p, slot, row);
  }
}

#endif

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) PrefillKernel(const __grid_constant__ PrefillArgs args) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  const PrefillShared<S> shared(memory);
  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    const int producers = S::kWide ? 1 : S::kWideningWarps * 32;
    shared.query_ring.Init(kQueryWarps * 32, kPrefillGroups * 4);
    shared.key_ring.Init(producers, kPrefillGroups * 4);
    shared.value_ring.Init(producers, kPrefillGroups * 4);
    shared.raw_ring.Init(1, max(S::kWideningWarps, 1));
    FenceProducts();
  }
  __syncthreads();
  if (group < kPrefillGroups) {
    TakeRegisters<S::kAttendingRegisters, true>();
    Attend(args.call, shared, group);
  } else {
    TakeRegisters<56, false>();
    WaitForPredecessor();
    LetSuccessorBegin();
    const int thread = static_cast<int>(threadIdx.x) - kPrefillGroups * 128;
    if (thread >= 128) {
      if constexpr (S::kGroups == 4) WidenBlocks(args.call, shared, thread - 128);
    } else if (thread >= 32) {
      ProduceQueries(args.call, shared, thread - 32);
    } else if constexpr (S::kWide) {
      ProduceBlocks(args, shared, lane);
    } else {
      ProduceRaw(args.call, shared, lane);
    }
  }
#endif
}

using EncodeMap = decltype(&cuTensorMapEncodeTiled);

inline EncodeMap FindEncodeMap() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeMap>(function)
                                                                       : nullptr;
}

template <typename S>
int LaunchPrefillShape(const PrefillLaunch& call, void* stream) {
  static const EncodeMap encode = FindEncodeMap();
  constexpr int kUnit = PrefillUnit(S::kDim);
  PrefillArgs args = {};
  args.call = call;
  const cuuint64_t sizes[4] = {S::kSlab / 2, CudaKvLayout::kTokens, S::kSlabs, call.arena_bytes / kUnit};
  const cuuint64_t steps[3] = {S::kRowBytes, S::kSlab, kUnit};
  const cuuint32_t box[4] = {S::kSlab / 2, CudaKvLayout::kTokens, 1, 1}, every[4] = {1, 1, 1, 1};
  if (S::kWide && (encode == nullptr ||
                   encode(&args.map, S::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                          const_cast<std::byte*>(call.arena), sizes, steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS))
    return static_cast<int>(cudaErrorInvalidValue);
  const auto kernel = PrefillKernel<S>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, PrefillShared<S>::kBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  return LaunchDependent(kernel, dim3(call.grid), S::kThreads, PrefillShared<S>::kBytes,
                         static_cast<cudaStream_t>(stream), args);
}

}  // namespace dovetail::kernels::cuda
