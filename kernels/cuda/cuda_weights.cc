#include "kernels/cuda/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "kernels/quant_format.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{32} << 20;
constexpr int64_t kElementsPerTask = 1 << 18;

void Store(WireType type, const std::vector<float>& values, std::byte* out) {
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = type == WireType::kBF16 ? ToBF16(values[i]).bits : ToF16(values[i]).bits;
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

}  // namespace

absl::StatusOr<CudaWeights> CudaWeights::Allocate(CudaDevice& device, int64_t rows, int64_t cols, WireType type) {
  if (type != WireType::kBF16 && type != WireType::kF16) {
    return InvalidArgument("weights on a GPU: type ", static_cast<int>(type), " is neither bfloat16 nor float16");
  }
  if (rows < 0 || cols < 0) return InvalidArgument("weights on a GPU: ", rows, " rows of ", cols, " elements");
  CudaWeights weights;
  weights.rows_ = rows;
  weights.cols_ = cols;
  weights.type_ = type;
  DT_ASSIGN_OR_RETURN(weights.memory_, device.Allocate(static_cast<size_t>(rows) * cols * 2));
  return weights;
}

absl::StatusOr<CudaWeights> CudaWeights::Load(CudaDevice& device, const RowSource& source, WireType type) {
  const RowFormatInfo& info = Info(source.format);
  if (source.cols % info.block_elements != 0) {
    return InvalidArgument("weights on a GPU: ", source.rows, " rows of ", source.cols, " ", info.name,
                           " elements, in blocks of ", info.block_elements);
  }
  DT_ASSIGN_OR_RETURN(CudaWeights weights, Allocate(device, source.rows, source.cols, type));
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<CudaWeightLoader> loader, CudaWeightLoader::Create(device));
  DT_RETURN_IF_ERROR(
      loader->Fill(weights, 0, source.rows, [&](int64_t row, int64_t count, std::span<float> out) {
        for (int64_t i = 0; i < count; ++i) {
          DequantizeRow(source.format, source.row_at(row + i), source.cols, out.data() + i * source.cols);
        }
      }));
  return weights;
}

absl::StatusOr<std::unique_ptr<CudaWeightLoader>> CudaWeightLoader::Create(CudaDevice& device) {
  DT_ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> stream, device.CreateCudaStream());
  auto loader = std::unique_ptr<CudaWeightLoader>(new CudaWeightLoader(std::move(stream)));
  for (Staging& half : loader->staging_) {
    DT_ASSIGN_OR_RETURN(half.memory, device.AllocatePinned(kStagingBytes));
    DT_ASSIGN_OR_RETURN(half.copied, device.CreateEvent());
  }
  return loader;
}

absl::Status CudaWeightLoader::Fill(CudaWeights& weights, int64_t first, int64_t count, ReadRows read) {
  if (first < 0 || count < 0 || first + count > weights.rows()) {
    return InvalidArgument("weights on a GPU: rows ", first, "..", first + count, " of ", weights.rows());
  }
  const int64_t cols = weights.cols();
  if (count == 0 || cols == 0) return absl::OkStatus();
  const size_t row_bytes = static_cast<size_t>(cols) * 2;
  if (row_bytes > kStagingBytes)
    return InvalidArgument("weights on a GPU: rows of ", cols, " elements are too long");
  const int64_t rows_at_once = static_cast<int64_t>(kStagingBytes / row_bytes);
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / cols);
  auto* to = static_cast<std::byte*>(weights.mutable_data()) + first * row_bytes;
  for (int64_t begin = 0, piece = 0; begin < count; begin += rows_at_once, ++piece) {
    Staging& half = staging_[piece % 2];
    if (half.used) DT_RETURN_IF_ERROR(half.copied.Synchronize());
    half.used = true;
    const int64_t rows = std::min(count - begin, rows_at_once);
    stream_->pool().Run(static_cast<int>((rows + rows_per_task - 1) / rows_per_task), [&](int task) {
      const int64_t row = task * rows_per_task, n = std::min(rows - row, rows_per_task);
      std::vector<float> values(n * cols);
      read(begin + row, n, values);
      Store(weights.type(), values, half.memory->data() + row * row_bytes);
    });
    DT_RETURN_IF_ERROR(stream_->Copy(to + begin * row_bytes, half.memory->data(), rows * row_bytes));
    DT_RETURN_IF_ERROR(stream_->Record(half.copied));
  }
  return stream_->SynchronizeStatus();
}

}  // namespace dovetail::kernels::cuda
