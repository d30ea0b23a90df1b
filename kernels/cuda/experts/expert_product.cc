#include "kernels/cuda/experts/expert_product.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/products/quant_ops.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr size_t kElement = 2;  // bytes of an unpacked weight

}  // namespace

size_t ExpertProduct::ScratchBytes(int64_t experts, int64_t n, int64_t k) {
  const size_t each = static_cast<size_t>(n) * static_cast<size_t>(k) * kElement;
  if (each == 0) return 0;
  return std::clamp<size_t>(kMostScratchBytes / each, 1, static_cast<size_t>(experts)) * each;
}

absl::StatusOr<std::unique_ptr<ExpertProduct>> ExpertProduct::Create(CudaDevice& device, size_t scratch_bytes) {
  std::unique_ptr<Buffer> scratch;
  if (scratch_bytes > 0) {
    DT_ASSIGN_OR_RETURN(scratch, device.Allocate(scratch_bytes));
  }
  return std::unique_ptr<ExpertProduct>(new ExpertProduct(std::move(scratch)));
}

absl::Status ExpertProduct::Run(CudaStream& stream, const CudaWeights& weights, const ExpertGemmLaunch& call,
                                int64_t rows) {
  ExpertGemmLaunch whole = call;
  whole.first_expert = 0;
  if (!weights.is_kept()) {
    whole.w = weights.data();
    return MultiplyExperts(stream, whole);
  }
  if (call.n < 1 || weights.kept().size() != 1 || weights.rows() != int64_t{call.experts} * call.n)
    return InvalidArgument("experts on a GPU: ", weights.kept().size(), " parts of ", weights.rows(), " rows are not ",
                           call.experts, " experts of ", call.n);
  const QuantMatrix& codes = weights.kept()[0].matrix;
  if (call.tile_rows != kFewTileRows) return RunUnpacked(stream, codes, whole);
  ExpertCodesLaunch launch;
  launch.product = whole;
  launch.codes = codes;
  launch.most_rows = static_cast<int32_t>(std::clamp<int64_t>(rows, 1, kFewTileRows));
  const absl::Status done = MultiplyExpertCodes(stream, launch);
  return absl::IsUnimplemented(done) ? RunUnpacked(stream, codes, whole) : done;
}

absl::Status ExpertProduct::RunUnpacked(CudaStream& stream, const QuantMatrix& codes, ExpertGemmLaunch call) {
  const size_t each = static_cast<size_t>(call.n) * call.k * kElement;
  const size_t room = scratch_ != nullptr && each > 0 ? scratch_->size_bytes() / each : 0;
  if (room == 0)
    return InvalidArgument("experts on a GPU: no memory to unpack one of ", call.n, " x ", call.k, " weights");
  const int32_t experts = call.experts, at_once = static_cast<int32_t>(std::min<size_t>(room, experts));
  call.w = scratch_->data();
  call.w_is_new = 1;
  for (int32_t first = 0; first < experts; first += at_once) {
    QuantUnpackLaunch unpack;
    unpack.w = codes;
    unpack.out = scratch_->data();
    unpack.out_stride = call.k;
    unpack.first = first * call.n;
    unpack.count = std::min(at_once, experts - first) * call.n;
    unpack.type = call.type;
    DT_RETURN_IF_ERROR(UnpackQuant(stream, unpack));
    call.first_expert = first;
    call.experts = std::min(at_once, experts - first);
    DT_RETURN_IF_ERROR(MultiplyExperts(stream, call));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels::cuda
