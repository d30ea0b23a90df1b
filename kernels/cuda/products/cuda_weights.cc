#include "kernels/cuda/products/cuda_weights.h"

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
constexpr int64_t kMostKeptRows = int64_t{1} << 30;

void Store(WireType type, const std::vector<float>& values, std::byte* out) {
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = type == WireType::kBF16 ? ToBF16(values[i]).bits : ToF16(values[i]).bits;
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

absl::Status CheckBlocks(const RowSource& source) {
  const RowFormatInfo& info = Info(source.format);
  if (source.cols % info.block_elements == 0) return absl::OkStatus();
  return InvalidArgument("weights on a GPU: ", source.rows, " rows of ", source.cols, " ", info.name,
                         " elements, in blocks of ", info.block_elements);
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

absl::StatusOr<CudaWeights> CudaWeights::AllocateKept(CudaDevice& device, std::span<const KeptRows> parts, int64_t cols,
                                                      WireType type) {
  CudaWeights weights;
  weights.cols_ = cols;
  weights.type_ = type;
  for (const KeptRows& part : parts) {
    if (part.rows < 0 || part.rows > kMostKeptRows || cols < 1 || cols % 8 != 0 || cols > kMostKeptRows)
      return InvalidArgument("weights on a GPU: ", part.rows, " rows of ", cols, " elements in ", Name(part.kind));
    if (part.halves_of != 0 && (part.halves_of % kQuantTileRows != 0 || part.rows % part.halves_of != 0))
      return InvalidArgument("weights on a GPU: ", part.rows, " rows are no matrices of ", part.halves_of,
                             " rows in tiles of two halves");
    if (part.rows == 0) continue;
    const QuantBytes bytes = QuantBytesOf(part.kind, part.rows, cols);
    DT_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> memory, device.Allocate(bytes.total()));
    Kept kept;
    kept.first = weights.rows_;
    kept.matrix.codes = memory->data();
    kept.matrix.scales = bytes.scales > 0 ? memory->data() + bytes.codes : nullptr;
    kept.matrix.factor = reinterpret_cast<const float*>(memory->data() + bytes.codes + bytes.scales);
    kept.matrix.rows = static_cast<int32_t>(part.rows);
    kept.matrix.cols = static_cast<int32_t>(cols);
    kept.matrix.kind = part.kind;
    kept.matrix.halves_of = part.halves_of;
    weights.kept_.push_back(kept);
    weights.kept_memory_.push_back(std::move(memory));
    weights.rows_ += part.rows;
  }
  return weights;
}

size_t CudaWeights::size_bytes() const {
  size_t bytes = memory_ != nullptr ? memory_->size_bytes() : 0;
  for (const std::unique_ptr<Buffer>& memory : kept_memory_) bytes += memory->size_bytes();
  return bytes;
}

absl::StatusOr<CudaWeights> CudaWeights::Keep(CudaDevice& device, const RowSource& source, WireType type) {
  DT_RETURN_IF_ERROR(CheckBlocks(source));
  const std::optional<QuantKind> kind = QuantKindOf(source.format);
  if (!kind.has_value())
    return InvalidArgument("weights on a GPU: ", Info(source.format).name, " is not kept in 4 or 8 bits");
  const KeptRows rows{*kind, source.rows};
  DT_ASSIGN_OR_RETURN(CudaWeights weights, AllocateKept(device, {&rows, 1}, source.cols, type));
  if (source.rows == 0) return weights;
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<CudaWeightLoader> loader, CudaWeightLoader::Create(device));
  DT_RETURN_IF_ERROR(loader->FillKept(weights, 0, [&](int64_t tile, QuantTile out) {
    const std::byte* at[kQuantTileRows];
    const int64_t first = tile * kQuantTileRows, count = std::min<int64_t>(kQuantTileRows, source.rows - first);
    for (int64_t i = 0; i < count; ++i) at[i] = source.row_at(first + i);
    PackQuantTile(source.format, source.cols, {at, static_cast<size_t>(count)}, out);
  }));
  return weights;
}

absl::StatusOr<CudaWeights> CudaWeights::Load(CudaDevice& device, const RowSource& source, WireType type) {
  DT_RETURN_IF_ERROR(CheckBlocks(source));
  DT_ASSIGN_OR_RETURN(CudaWeights weights, Allocate(device, source.rows, source.cols, type));
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<CudaWeightLoader> loader, CudaWeightLoader::Create(device));
  DT_RETURN_IF_ERROR(loader->Fill(weights, 0, source.rows, [&](int64_t row, int64_t count, std::span<float> out) {
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

absl::StatusOr<CudaWeightLoader::Staging*> CudaWeightLoader::Take() {
  Staging& half = staging_[turn_++ % 2];
  if (half.used) DT_RETURN_IF_ERROR(half.copied.Synchronize());
  half.used = true;
  return &half;
}

absl::Status CudaWeightLoader::FillKept(CudaWeights& weights, size_t part, PackTile pack) {
  const QuantMatrix& w = weights.kept()[part].matrix;
  const QuantBytes tile = QuantBytesOf(w.kind, kQuantTileRows, w.cols);
  if (tile.total() > kStagingBytes)
    return InvalidArgument("weights on a GPU: rows of ", w.cols, " elements are too long");
  const int64_t at_once = static_cast<int64_t>(kStagingBytes / tile.total()), all = w.tiles();
  for (int64_t begin = 0; begin < all; begin += at_once) {
    DT_ASSIGN_OR_RETURN(Staging* const half, Take());
    const int64_t count = std::min(all - begin, at_once);
    std::byte* const codes = half->memory->data();
    std::byte* const scales = codes + count * tile.codes;
    std::byte* const factors = scales + count * tile.scales;
    stream_->pool().Run(static_cast<int>(count), [&](int i) {
      pack(begin + i,
           {codes + i * tile.codes, scales + i * tile.scales, reinterpret_cast<float*>(factors) + i * kQuantTileRows});
    });
    struct Piece {
      const void* to;
      const std::byte* from;
      size_t bytes;
    };
    for (const Piece& piece : {Piece{w.codes, codes, tile.codes}, Piece{w.scales, scales, tile.scales},
                               Piece{w.factor, factors, tile.factors}}) {
      if (piece.bytes == 0) continue;
      auto* const to = static_cast<std::byte*>(const_cast<void*>(piece.to)) + begin * piece.bytes;
      DT_RETURN_IF_ERROR(stream_->Copy(to, piece.from, count * piece.bytes));
    }
    DT_RETURN_IF_ERROR(stream_->Record(half->copied));
  }
  return stream_->SynchronizeStatus();
}

absl::Status CudaWeightLoader::Fill(CudaWeights& weights, int64_t first, int64_t count, ReadRows read) {
  if (first < 0 || count < 0 || first + count > weights.rows()) {
    return InvalidArgument("weights on a GPU: rows ", first, "..", first + count, " of ", weights.rows());
  }
  const int64_t cols = weights.cols();
  if (count == 0 || cols == 0) return absl::OkStatus();
  const size_t row_bytes = static_cast<size_t>(cols) * 2;
  if (row_bytes > kStagingBytes) return InvalidArgument("weights on a GPU: rows of ", cols, " elements are too long");
  const int64_t rows_at_once = static_cast<int64_t>(kStagingBytes / row_bytes);
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / cols);
  auto* to = static_cast<std::byte*>(weights.mutable_data()) + first * row_bytes;
  for (int64_t begin = 0; begin < count; begin += rows_at_once) {
    DT_ASSIGN_OR_RETURN(Staging* const staging, Take());
    Staging& half = *staging;
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
