#include "examples/spatio_temporal/gpu/gpu_block.h"

#include <algorithm>

#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::Buffer;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaStream;

constexpr float kNormEps = 1e-6f;

}  // namespace

GpuBlock::GpuBlock(const Config& config, int64_t chunk_rows)
    : config_(config), chunk_rows_(chunk_rows), head_row_(config.heads * int64_t{PaddedHeadDim(config.head_dim())}) {}

absl::StatusOr<std::unique_ptr<GpuBlock>> GpuBlock::Create(const Config& config, CudaDevice& device,
                                                           int64_t chunk_rows) {
  if (chunk_rows < 1 || chunk_rows > kMostChunkRows)
    return InvalidArgument("--chunk-rows ", chunk_rows, " is outside 1..", kMostChunkRows);
  auto block = std::unique_ptr<GpuBlock>(new GpuBlock(config, chunk_rows));
  if (config.exchange_only) return block;
  const int64_t rows = (3 * chunk_rows + 1) / 2;
  DT_ASSIGN_OR_RETURN(block->gemm_, kernels::cuda::CudaGemm::Create(device));
  DT_ASSIGN_OR_RETURN(block->normed_, device.Allocate(rows * config.channels * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(block->gate_up_, device.Allocate(2 * rows * config.mlp() * sizeof(BF16)));
  DT_ASSIGN_OR_RETURN(block->inner_, device.Allocate(rows * config.mlp() * sizeof(BF16)));
  return block;
}

template <typename Part>
absl::Status GpuBlock::ForChunks(int64_t rows, Part&& part) const {
  const int64_t chunks = std::max<int64_t>(1, (2 * rows + 3 * chunk_rows_ - 1) / (3 * chunk_rows_));
  const int64_t each = (rows + chunks - 1) / chunks;
  for (int64_t first = 0; first < rows; first += each) DT_RETURN_IF_ERROR(part(first, std::min(each, rows - first)));
  return absl::OkStatus();
}

absl::Status GpuBlock::Multiply(CudaStream& stream, const void* x, const Buffer& w, void* y, int64_t rows, int64_t n,
                                int64_t k, bool accumulate) {
  kernels::cuda::GemmCall call{};
  call.x = x;
  call.w = const_cast<Buffer&>(w).data();
  call.y = y;
  call.m = rows;
  call.n = n;
  call.k = k;
  call.x_stride = call.w_stride = k;
  call.y_stride = n;
  call.type = kernels::cuda::GemmType::kBF16;
  call.accumulate = accumulate ? 1 : 0;
  return gemm_->Run(stream, call);
}

absl::Status GpuBlock::Norm(CudaStream& stream, const BF16* x, const Buffer& weight, int64_t rows) {
  const int64_t c = config_.channels;
  kernels::cuda::RmsNormLaunch norm;
  norm.x = const_cast<BF16*>(x);  // is not changed without a residual
  norm.weight = reinterpret_cast<const float*>(const_cast<Buffer&>(weight).data());
  norm.out = normed_->data();
  norm.x_step = norm.out_step = c;
  norm.eps = kNormEps;
  norm.rows = static_cast<int32_t>(rows);
  norm.size = static_cast<int32_t>(c);
  return kernels::cuda::RmsNorm(stream, norm);
}

absl::Status GpuBlock::Project(CudaStream& stream, const GpuBlockWeights& weights, const BF16* x, int64_t rows,
                               BF16* query_key_value) {
  if (config_.exchange_only) return absl::OkStatus();
  const int64_t c = config_.channels, wide = 3 * head_row_;
  return ForChunks(rows, [&](int64_t first, int64_t count) -> absl::Status {
    DT_RETURN_IF_ERROR(Norm(stream, x + first * c, *weights.attention_norm, count));
    return Multiply(stream, normed_->data(), *weights.query_key_value, query_key_value + first * wide, count, wide, c,
                    false);
  });
}

absl::Status GpuBlock::Finish(CudaStream& stream, const GpuBlockWeights& weights, const BF16* o, int64_t rows,
                              BF16* x) {
  if (config_.exchange_only) return absl::OkStatus();
  return ForChunks(rows, [&](int64_t first, int64_t count) {
    return FinishChunk(stream, weights, o + first * head_row_, count, x + first * config_.channels);
  });
}

// q, k, v and o lie where the MLP's inner rows do: 3 heads x padded numbers, at most 6 C, fit where gate and up do.
absl::Status GpuBlock::ProductsOnly(CudaStream& stream, const GpuBlockWeights& weights, int64_t rows) {
  const int64_t c = config_.channels, mlp = config_.mlp();
  if (3 * head_row_ > 2 * mlp || head_row_ > mlp || rows > chunk_rows_)
    return InvalidArgument("products of ", rows, " rows with heads padded to ", head_row_, " numbers do not fit");
  DT_RETURN_IF_ERROR(
      Multiply(stream, normed_->data(), *weights.query_key_value, gate_up_->data(), rows, 3 * head_row_, c, false));
  DT_RETURN_IF_ERROR(Multiply(stream, inner_->data(), *weights.out, normed_->data(), rows, c, head_row_, true));
  DT_RETURN_IF_ERROR(Multiply(stream, normed_->data(), *weights.gate_up, gate_up_->data(), rows, 2 * mlp, c, false));
  return Multiply(stream, inner_->data(), *weights.down, normed_->data(), rows, c, mlp, true);
}

absl::Status GpuBlock::FinishChunk(CudaStream& stream, const GpuBlockWeights& weights, const BF16* o, int64_t rows,
                                   BF16* x) {
  const int64_t c = config_.channels, mlp = config_.mlp();
  DT_RETURN_IF_ERROR(Multiply(stream, o, *weights.out, x, rows, c, head_row_, true));
  DT_RETURN_IF_ERROR(Norm(stream, x, *weights.mlp_norm, rows));
  DT_RETURN_IF_ERROR(Multiply(stream, normed_->data(), *weights.gate_up, gate_up_->data(), rows, 2 * mlp, c, false));
  kernels::cuda::ActivationLaunch activation;
  activation.gate = gate_up_->data();
  activation.up = reinterpret_cast<const BF16*>(gate_up_->data()) + mlp;
  activation.out = inner_->data();
  activation.gate_step = activation.up_step = 2 * mlp;
  activation.out_step = mlp;
  activation.gelu = 1;
  activation.rows = static_cast<int32_t>(rows);
  activation.size = static_cast<int32_t>(mlp);
  DT_RETURN_IF_ERROR(kernels::cuda::GatedActivation(stream, activation));
  return Multiply(stream, inner_->data(), *weights.down, x, rows, c, mlp, true);
}

}  // namespace dovetail::spatio_temporal
