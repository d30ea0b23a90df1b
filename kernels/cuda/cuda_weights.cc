#include "kernels/cuda/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "kernels/quant_format.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{8} << 20;

// Where rows wait for their copy: two halves, so that one is filled while the other travels.
struct Staging {
  std::unique_ptr<Buffer> memory;
  CudaEvent copied;
  bool used = false;
};

void StoreRow(WireType type, const std::vector<float>& row, std::byte* out) {
  for (size_t i = 0; i < row.size(); ++i) {
    const uint16_t bits = type == WireType::kBF16 ? ToBF16(row[i]).bits : ToF16(row[i]).bits;
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

absl::Status CheckSource(const RowSource& source, WireType type) {
  if (type != WireType::kBF16 && type != WireType::kF16) {
    return InvalidArgument("weights on a GPU: type ", static_cast<int>(type), " is neither bfloat16 nor float16");
  }
  const RowFormatInfo& info = Info(source.format);
  if (source.rows < 0 || source.cols < 0 || source.cols % info.block_elements != 0) {
    return InvalidArgument("weights on a GPU: ", source.rows, " rows of ", source.cols, " ", info.name,
                           " elements, in blocks of ", info.block_elements);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CudaWeights> CudaWeights::Load(CudaDevice& device, const RowSource& source, WireType type) {
  DT_RETURN_IF_ERROR(CheckSource(source, type));
  CudaWeights weights;
  weights.rows_ = source.rows;
  weights.cols_ = source.cols;
  weights.type_ = type;
  const size_t row_bytes = static_cast<size_t>(source.cols) * 2;
  DT_ASSIGN_OR_RETURN(weights.memory_, device.Allocate(row_bytes * source.rows));
  if (source.rows == 0 || source.cols == 0) return weights;
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<CudaStream> stream, device.CreateCudaStream());
  const int64_t rows_at_once = std::max<int64_t>(1, static_cast<int64_t>(kStagingBytes / row_bytes));
  Staging staging[2];
  for (Staging& half : staging) {
    DT_ASSIGN_OR_RETURN(half.memory, device.AllocatePinned(std::min(rows_at_once, source.rows) * row_bytes));
    DT_ASSIGN_OR_RETURN(half.copied, device.CreateEvent());
  }
  std::vector<float> row(source.cols);
  for (int64_t begin = 0, piece = 0; begin < source.rows; begin += rows_at_once, ++piece) {
    Staging& half = staging[piece % 2];
    if (half.used) DT_RETURN_IF_ERROR(half.copied.Synchronize());
    half.used = true;
    const int64_t end = std::min(source.rows, begin + rows_at_once);
    for (int64_t r = begin; r < end; ++r) {
      DequantizeRow(source.format, source.row_at(r), source.cols, row.data());
      StoreRow(type, row, half.memory->data() + (r - begin) * row_bytes);
    }
    DT_RETURN_IF_ERROR(
        stream->Copy(weights.memory_->data() + begin * row_bytes, half.memory->data(), (end - begin) * row_bytes));
    DT_RETURN_IF_ERROR(stream->Record(half.copied));
  }
  DT_RETURN_IF_ERROR(stream->SynchronizeStatus());
  return weights;
}

}  // namespace dovetail::kernels::cuda
