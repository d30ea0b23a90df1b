#include "examples/spatio_temporal/gpu/gpu_weights.h"

#include <algorithm>
#include <utility>

#include "base/dtype.h"
#include "examples/spatio_temporal/weights.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::Buffer;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaStream;

template <typename T>
absl::StatusOr<std::unique_ptr<Buffer>> Upload(CudaDevice& device, CudaStream& stream, const std::vector<T>& values) {
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, device.Allocate(values.size() * sizeof(T)));
  DT_RETURN_IF_ERROR(stream.Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // `values` may go
  return buffer;
}

// Rows of heads: row i of head h is put at h * padded + i of its part.
std::vector<BF16> PadRows(const Config& config, const std::vector<const std::vector<BF16>*>& parts) {
  const int64_t dim = config.head_dim(), padded = PaddedHeadDim(dim), c = config.channels;
  std::vector<BF16> rows(parts.size() * config.heads * padded * c, BF16{0});
  for (size_t part = 0; part < parts.size(); ++part)
    for (int64_t head = 0; head < config.heads; ++head)
      std::copy_n(parts[part]->data() + head * dim * c, dim * c,
                  rows.data() + (static_cast<int64_t>(part) * config.heads + head) * padded * c);
  return rows;
}

std::vector<BF16> PadColumns(const Config& config, const std::vector<BF16>& matrix) {
  const int64_t dim = config.head_dim(), padded = PaddedHeadDim(dim), c = config.channels;
  std::vector<BF16> wide(c * config.heads * padded, BF16{0});
  for (int64_t piece = 0; piece < c * config.heads; ++piece)
    std::copy_n(matrix.data() + piece * dim, dim, wide.data() + piece * padded);
  return wide;
}

absl::StatusOr<GpuBlockWeights> UploadBlock(const Config& config, BlockValues values, CudaDevice& device,
                                            CudaStream& stream) {
  GpuBlockWeights block;
  DT_ASSIGN_OR_RETURN(block.attention_norm, Upload(device, stream, values.attention_norm));
  DT_ASSIGN_OR_RETURN(block.mlp_norm, Upload(device, stream, values.mlp_norm));
  DT_ASSIGN_OR_RETURN(block.query_key_value,
                      Upload(device, stream, PadRows(config, {&values.query, &values.key, &values.value})));
  DT_ASSIGN_OR_RETURN(block.out, Upload(device, stream, PadColumns(config, values.out)));
  values.gate.insert(values.gate.end(), values.up.begin(), values.up.end());
  DT_ASSIGN_OR_RETURN(block.gate_up, Upload(device, stream, values.gate));
  DT_ASSIGN_OR_RETURN(block.down, Upload(device, stream, values.down));
  return block;
}

}  // namespace

int PaddedHeadDim(int64_t dim) {
  constexpr int64_t kSmall = 56;  // below, padding to 64 would cost more than the other kernel does
  if (dim > kSmall)
    for (const int size : {64, 80, 96, 128, 256})
      if (dim <= size) return size;
  return static_cast<int>((dim + 7) / 8 * 8);
}

absl::StatusOr<GpuWeights> GpuWeights::Random(const Config& config, CudaDevice& device) {
  GpuWeights weights;
  if (config.exchange_only) {
    weights.spatial.resize(config.pairs);
    weights.temporal.resize(config.pairs);
    return weights;
  }
  DT_ASSIGN_OR_RETURN(const auto stream, device.CreateCudaStream());
  for (int pair = 0; pair < config.pairs; ++pair) {
    DT_ASSIGN_OR_RETURN(auto spatial,
                        UploadBlock(config, RandomBlock(config, pair, BlockKind::kSpatial), device, *stream));
    DT_ASSIGN_OR_RETURN(auto temporal,
                        UploadBlock(config, RandomBlock(config, pair, BlockKind::kTemporal), device, *stream));
    weights.spatial.push_back(std::move(spatial));
    weights.temporal.push_back(std::move(temporal));
  }
  return weights;
}

}  // namespace dovetail::spatio_temporal
