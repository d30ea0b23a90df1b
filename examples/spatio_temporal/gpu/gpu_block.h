#pragma once
#include <memory>

#include "base/dtype.h"
#include "base/status.h"
#include "examples/spatio_temporal/config.h"
#include "examples/spatio_temporal/gpu/gpu_weights.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::spatio_temporal {

// The dense operators of a block on rows that lie one behind the other: norms, products, gated MLP. Rows go through
// them a chunk at a time, in chunks of one size as far as the rows divide, because cuBLASLt's algorithm and so a row's
// bits may depend on the number of rows. Enqueues and returns.
// Numbers: as BlockCompute's, but that the sum of x and the attention's result is rounded to bf16 as the block's is,
// and q, k, v, o and the MLP's inner rows are in bf16 between two kernels.
// Ownership: config and device outlive it.
// Threads: one stream at a time; chunks share memory.
class GpuBlock {
 public:
  static constexpr int64_t kMostChunkRows = 32768;

  // kInvalidArgument: chunk_rows outside 1..kMostChunkRows. kFailedPrecondition: no cuBLASLt. kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<GpuBlock>> Create(const Config& config, kernels::cuda::CudaDevice& device,
                                                          int64_t chunk_rows);

  // q, k and v [rows][3][heads][padded] of the normalised rows x [rows][C].
  absl::Status Project(kernels::cuda::CudaStream& stream, const GpuBlockWeights& weights, const BF16* x, int64_t rows,
                       BF16* query_key_value);
  // x += o W; x += MLP(norm(x)). o [rows][heads][padded].
  absl::Status Finish(kernels::cuda::CudaStream& stream, const GpuBlockWeights& weights, const BF16* o, int64_t rows,
                      BF16* x);
  // The products of Project and Finish on whatever the chunk's memory holds, for measuring. At most chunk_rows rows.
  absl::Status ProductsOnly(kernels::cuda::CudaStream& stream, const GpuBlockWeights& weights, int64_t rows);

 private:
  GpuBlock(const Config& config, int64_t chunk_rows);
  // y = x w^T (+ y), everything dense.
  absl::Status Multiply(kernels::cuda::CudaStream& stream, const void* x, const kernels::Buffer& w, void* y,
                        int64_t rows, int64_t n, int64_t k, bool accumulate);
  absl::Status Norm(kernels::cuda::CudaStream& stream, const BF16* x, const kernels::Buffer& weight, int64_t rows);
  absl::Status FinishChunk(kernels::cuda::CudaStream& stream, const GpuBlockWeights& weights, const BF16* o,
                           int64_t rows, BF16* x);
  // part(first row, rows) for chunks of at most one and a half times chunk_rows.
  template <typename Part>
  absl::Status ForChunks(int64_t rows, Part&& part) const;

  const Config& config_;
  const int64_t chunk_rows_;
  const int64_t head_row_;  // numbers of [heads][padded]
  std::unique_ptr<kernels::cuda::CudaGemm> gemm_;
  std::unique_ptr<kernels::Buffer> normed_, gate_up_, inner_;  // of a chunk
};

}  // namespace dovetail::spatio_temporal
