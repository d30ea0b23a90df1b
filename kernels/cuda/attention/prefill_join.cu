#include "kernels/cuda/attention/attention_output.cuh"
#include "kernels/cuda/attention/prefill_args.h"
#include "kernels/cuda/attention/prefill_fold.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"

// Joins what thread blocks of the attention kernel for many rows (prefill_kernel.cuh) stored of some rows' keys each.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kBlockRows = kWarps * PieceRows::kRows;  // that a thread block joins

// A warp has four rows of a join's 128. Which warp joins them, and in which order, does not depend on anything else.
template <int kRuns>
__global__ void __launch_bounds__(kWarps * 32) PrefillJoinKernel(const __grid_constant__ PrefillLaunch p) {
  WaitForPredecessor();
  LetSuccessorBegin();
  constexpr int kBlocks = kPrefillRows / kBlockRows;
  const PrefillJoin join = p.joins[blockIdx.x / kBlocks];
  const DeviceAttentionItem& item = p.items[join.item];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x % kBlocks) * kBlockRows + warp * PieceRows::kRows;
  const int rows = min(PieceRows::kRows, item.q_rows * p.group - join.row0 - row);
  if (rows <= 0) return;
  const int dims = p.layout.value_dim;
  const int64_t first_row = static_cast<int64_t>(join.first_piece) * kPrefillRows;
  const float *o = p.piece_o + first_row * dims, *ml = p.piece_ml + first_row * 2;
  const PieceRows pieces{.first_o = o,
                         .first_ml = ml,
                         .rest_o = o + static_cast<int64_t>(kPrefillRows) * dims,
                         .rest_ml = ml + kPrefillRows * 2,
                         .step = kPrefillRows,
                         .dims = dims,
                         .count = join.pieces};
  pieces.Join<kRuns>(p, item, join.head, join.row0, row, rows, lane);
}

// Fixed pieces (PrefillLaunch::fold) of one row, one warp: from the last to the first, some loads ahead. Lanes hold
// runs of four dimensions, 128 apart.
template <int kRuns>
__device__ __forceinline__ void FoldRow(const PrefillLaunch& p, const PrefillJoin& join, int row, int lane) {
  constexpr int kAhead = 4;
  const DeviceAttentionItem& item = p.items[join.item];
  const int dims = p.layout.value_dim;
  int dim[kRuns];
#pragma unroll
  for (int v = 0; v < kRuns; ++v) dim[v] = min(4 * lane + 128 * v, dims - 4);
  Folded all;
  float4 o[kRuns];
#pragma unroll
  for (int v = 0; v < kRuns; ++v) o[v] = make_float4(0, 0, 0, 0);
  for (int end = join.pieces; end > 0; end -= kAhead) {
    float2 ml[kAhead];
    float4 x[kAhead][kRuns];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = static_cast<int64_t>(join.first_piece + max(end - 1 - i, 0)) * kPrefillRows + row;
      ml[i] = __ldcg(reinterpret_cast<const float2*>(p.piece_ml + at * 2));
#pragma unroll
      for (int v = 0; v < kRuns; ++v) x[i][v] = __ldcg(reinterpret_cast<const float4*>(p.piece_o + at * dims + dim[v]));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (end - 1 - i < 0) continue;
      const FoldFactors factors = FoldPiece(all, ml[i].x, ml[i].y);
#pragma unroll
      for (int v = 0; v < kRuns; ++v) {
        o[v].x = FoldSum(factors, o[v].x, x[i][v].x), o[v].y = FoldSum(factors, o[v].y, x[i][v].y);
        o[v].z = FoldSum(factors, o[v].z, x[i][v].z), o[v].w = FoldSum(factors, o[v].w, x[i][v].w);
      }
    }
  }
  const RowResult result = ResultOf(p, item, join.head, join.row0 + row, all.m, all.l);
#pragma unroll
  for (int v = 0; v < kRuns; ++v) {
    if (4 * lane + 128 * v >= dims) continue;
    result.StorePair(p, dim[v], o[v].x, o[v].y);
    result.StorePair(p, dim[v] + 2, o[v].z, o[v].w);
  }
  if (lane < 4) result.StoreRest(p, item, lane);
}

template <int kRuns>
__global__ void __launch_bounds__(kWarps * 32) PrefillFoldKernel(const __grid_constant__ PrefillLaunch p) {
  WaitForPredecessor();
  LetSuccessorBegin();
  constexpr int kBlocks = kPrefillRows / kWarps;
  const PrefillJoin join = p.joins[blockIdx.x / kBlocks];
  if (join.pieces == 0) return;
  const int row = static_cast<int>(blockIdx.x % kBlocks) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (join.row0 + row < p.items[join.item].q_rows * p.group)
    FoldRow<kRuns>(p, join, row, static_cast<int>(threadIdx.x) % 32);
}

}  // namespace

int LaunchPrefillJoin(const PrefillLaunch& launch, void* stream) {
  if (launch.join_count == 0) return 0;
  if (launch.fold != nullptr) {
    const dim3 rows(static_cast<unsigned>(launch.join_count * (kPrefillRows / kWarps)));
    const auto fold = launch.layout.value_dim > 128 ? PrefillFoldKernel<2> : PrefillFoldKernel<1>;
    return LaunchDependent(fold, rows, kWarps * 32, 0, static_cast<cudaStream_t>(stream), launch);
  }
  const dim3 grid(static_cast<unsigned>(launch.join_count * (kPrefillRows / kBlockRows)));
  const auto kernel = launch.layout.value_dim > 128 ? PrefillJoinKernel<2> : PrefillJoinKernel<1>;
  return LaunchDependent(kernel, grid, kWarps * 32, 0, static_cast<cudaStream_t>(stream), launch);
}

}  // namespace dovetail::kernels::cuda
