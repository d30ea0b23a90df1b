#include "kernels/cuda/products/cuda_product.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/products/quant_ops.h"

namespace dovetail::kernels::cuda {
namespace {

// y and bias from column `first` of the output on.
GemmCall From(GemmCall call, int64_t first, int64_t count) {
  const size_t element = call.y_is_f32 ? 4 : 2;
  call.y = static_cast<std::byte*>(call.y) + first * element;
  if (call.bias != nullptr) call.bias = static_cast<const std::byte*>(call.bias) + first * element;
  call.n = count;
  return call;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaProduct>> CudaProduct::Create(CudaDevice& device, bool keeps, bool in_order) {
  if (keeps && in_order) return InvalidArgument("products on a GPU: weights in few bits have no one order of sums");
  DT_ASSIGN_OR_RETURN(std::unique_ptr<CudaGemm> gemm, CudaGemm::Create(device));
  std::unique_ptr<Buffer> scratch;
  if (keeps) {
    DT_ASSIGN_OR_RETURN(scratch, device.Allocate(kScratchBytes));
  }
  return std::unique_ptr<CudaProduct>(new CudaProduct(std::move(gemm), std::move(scratch), in_order));
}

absl::Status CudaProduct::Run(CudaStream& stream, const CudaWeights& weights, const GemmCall& call) {
  if (call.n != weights.rows() || call.k != weights.cols())
    return InvalidArgument("product on a GPU: ", call.n, " x ", call.k, " of weights of ", weights.rows(), " x ",
                           weights.cols());
  if (weights.is_kept() && call.parts > 1) return InvalidArgument("product on a GPU: parts of weights in few bits");
  if (!weights.is_kept()) {
    GemmCall whole = call;
    whole.w = weights.data();
    whole.w_stride = call.k;
    whole.in_order = in_order_ ? 1 : 0;
    return gemm_->Run(stream, whole);
  }
  if (call.only_choose != 0) return absl::OkStatus();  // their own kernels, and products of what is unpacked at a time
  for (const CudaWeights::Kept& part : weights.kept()) {
    const GemmCall mine = From(call, part.first, part.matrix.rows);
    if (call.m > kMostKeptRows) {
      DT_RETURN_IF_ERROR(RunUnpacked(stream, part.matrix, weights.type(), mine));
      continue;
    }
    const absl::Status kept = RunKept(stream, part.matrix, weights.type(), mine);
    if (absl::IsUnimplemented(kept)) {
      DT_RETURN_IF_ERROR(RunUnpacked(stream, part.matrix, weights.type(), mine));
    } else {
      DT_RETURN_IF_ERROR(kept);
    }
  }
  return absl::OkStatus();
}

absl::Status CudaProduct::RunKept(CudaStream& stream, const QuantMatrix& w, WireType type, const GemmCall& call) {
  QuantGemmLaunch launch;
  launch.w = w;
  launch.x = call.x;
  launch.y = call.y;
  launch.bias = call.bias;
  launch.x_stride = call.x_stride;
  launch.y_stride = call.y_stride;
  launch.m = static_cast<int32_t>(call.m);
  launch.type = type;
  launch.y_is_f32 = call.y_is_f32;
  launch.accumulate = call.accumulate;
  return MultiplyQuant(stream, launch);
}

absl::Status CudaProduct::RunUnpacked(CudaStream& stream, const QuantMatrix& w, WireType type, const GemmCall& call) {
  const int64_t room = static_cast<int64_t>(kScratchBytes / 2) / w.cols / kQuantTileRows * kQuantTileRows;
  if (scratch_ == nullptr || room == 0)
    return InvalidArgument("product on a GPU: no memory to unpack rows of ", w.cols, " elements");
  // Equal pieces: few sizes to choose algorithms for.
  const int64_t pieces = (w.rows + room - 1) / room;
  const int64_t at_once = ((w.rows + pieces - 1) / pieces + kQuantTileRows - 1) / kQuantTileRows * kQuantTileRows;
  for (int64_t first = 0; first < w.rows; first += at_once) {
    QuantUnpackLaunch unpack;
    unpack.w = w;
    unpack.out = scratch_->data();
    unpack.out_stride = w.cols;
    unpack.first = static_cast<int32_t>(first);
    unpack.count = static_cast<int32_t>(std::min<int64_t>(at_once, w.rows - first));
    unpack.type = type;
    DT_RETURN_IF_ERROR(UnpackQuant(stream, unpack));
    GemmCall piece = From(call, first, unpack.count);
    piece.w = scratch_->data();
    piece.w_stride = w.cols;
    piece.w_is_new = 1;
    DT_RETURN_IF_ERROR(gemm_->Run(stream, piece));
  }
  return absl::OkStatus();
}

absl::Status EmbedFrom(CudaStream& stream, const CudaWeights& table, const EmbedLaunch& args) {
  if (!table.is_kept()) {
    EmbedLaunch wide = args;
    wide.table = table.data();
    wide.table_type = table.type();
    return Embed(stream, wide);
  }
  if (table.kept().size() != 1 || args.size != table.cols())
    return InvalidArgument("embedding on a GPU: ", table.kept().size(), " tables of ", table.cols(), " elements, not ",
                           args.size);
  QuantEmbedLaunch kept;
  kept.w = table.kept()[0].matrix;
  kept.ids = args.ids;
  kept.drawn = args.drawn;
  kept.out = args.out;
  kept.out_type = args.out_type;
  kept.factor = args.factor;
  kept.rows = args.rows;
  return EmbedQuant(stream, kept);
}

}  // namespace dovetail::kernels::cuda
