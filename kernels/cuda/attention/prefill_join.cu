#include "kernels/cuda/attention/attention_output.cuh"
#include "kernels/cuda/attention/prefill_args.h"
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

}  // namespace

int LaunchPrefillJoin(const PrefillLaunch& launch, void* stream) {
  if (launch.join_count == 0) return 0;
  const dim3 grid(static_cast<unsigned>(launch.join_count * (kPrefillRows / kBlockRows)));
  const auto kernel = launch.layout.value_dim > 128 ? PrefillJoinKernel<2> : PrefillJoinKernel<1>;
  return LaunchDependent(kernel, grid, kWarps * 32, 0, static_cast<cudaStream_t>(stream), launch);
}

}  // namespace dovetail::kernels::cuda
