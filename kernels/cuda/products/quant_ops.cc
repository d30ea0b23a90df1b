#include "kernels/cuda/products/quant_ops.h"

#include <initializer_list>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr uintptr_t kAlignment = 16;

bool AllAligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers)
    if (pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % kAlignment != 0) return false;
  return true;
}

absl::Status CheckMatrix(const QuantMatrix& w, const char* op) {
  if (w.rows < 0 || w.cols < 1 || w.cols % 8 != 0)
    return InvalidArgument(op, " in 4 or 8 bits on a GPU: ", w.rows, " rows of ", w.cols,
                           " weights; a multiple of 8 is needed");
  if (w.rows == 0) return absl::OkStatus();
  const bool scaled = TraitsOf(w.kind).values > 0;
  if (!AllAligned({w.codes, w.factor}) || (scaled && !AllAligned({w.scales})))
    return InvalidArgument(op, " in 4 or 8 bits on a GPU: codes, scales or factors are null or not 16-byte aligned");
  return absl::OkStatus();
}

absl::Status CheckInOrder(const QuantMatrix& w, const char* op) {
  if (w.halves_of == 0) return absl::OkStatus();
  return InvalidArgument(op, " in 4 or 8 bits on a GPU: tiles have the rows of two halves, as only experts take them");
}

}  // namespace

absl::Status MultiplyQuant(CudaStream& stream, const QuantGemmLaunch& args) {
  DT_RETURN_IF_ERROR(CheckMatrix(args.w, "product"));
  DT_RETURN_IF_ERROR(CheckInOrder(args.w, "product"));
  if (args.m < 0 || args.m > kMostQuantRows || args.x_stride < args.w.cols || args.x_stride % 8 != 0 ||
      args.y_stride < args.w.rows || args.type == WireType::kF32) {
    return InvalidArgument("product in 4 or 8 bits on a GPU: ", args.m, " rows (at most ", kMostQuantRows,
                           ") with strides ", args.x_stride, ", ", args.y_stride);
  }
  if (args.m == 0 || args.w.rows == 0) return absl::OkStatus();
  if (!AllAligned({args.x}) || args.y == nullptr)
    return InvalidArgument("product in 4 or 8 bits on a GPU: x or y is null, or x is not 16-byte aligned");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = stream.device().library()->quant_gemm(&args, stream.handle());
  if (error == kQuantTooWide)
    return Unimplemented("product in 4 or 8 bits on a GPU: ", args.m, " rows of ", args.w.cols,
                         " elements do not fit into shared memory");
  return stream.device().library().Check(error, stream.device().name() + ": product in 4 or 8 bits");
}

absl::Status UnpackQuant(CudaStream& stream, const QuantUnpackLaunch& args) {
  DT_RETURN_IF_ERROR(CheckMatrix(args.w, "unpacking"));
  const int32_t each = args.w.halves_of;
  if (each < 0 || each % kQuantTileRows != 0 || (each > 0 && (args.first % each != 0 || args.count % each != 0)))
    return InvalidArgument("unpacking on a GPU: rows ", args.first, " + ", args.count, " of matrices of ", each,
                           " rows; whole ones, of a multiple of ", kQuantTileRows, ", are supported");
  if (args.first < 0 || args.count < 0 || args.count > args.w.rows - args.first || args.out_stride < args.w.cols ||
      args.out_stride % 8 != 0 || args.type == WireType::kF32) {
    return InvalidArgument("unpacking on a GPU: rows ", args.first, " + ", args.count, " of ", args.w.rows,
                           " with a stride of ", args.out_stride);
  }
  if (args.count == 0) return absl::OkStatus();
  if (!AllAligned({args.out})) return InvalidArgument("unpacking on a GPU: out is null or not 16-byte aligned");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(stream.device().library()->quant_unpack(&args, stream.handle()),
                                         stream.device().name() + ": unpacking");
}

absl::Status EmbedQuant(CudaStream& stream, const QuantEmbedLaunch& args) {
  DT_RETURN_IF_ERROR(CheckMatrix(args.w, "embedding"));
  DT_RETURN_IF_ERROR(CheckInOrder(args.w, "embedding"));
  if (args.rows < 0 || args.rows > 65535) return InvalidArgument("embedding on a GPU: ", args.rows, " rows");
  if (args.rows == 0) return absl::OkStatus();
  if (!AllAligned({args.out}) || args.ids == nullptr)
    return InvalidArgument("embedding on a GPU: ids or out is null, or out is not 16-byte aligned");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(stream.device().library()->quant_embed(&args, stream.handle()),
                                         stream.device().name() + ": embedding");
}

}  // namespace dovetail::kernels::cuda
