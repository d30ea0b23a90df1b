#include "kernels/cuda/products/cuda_gemm.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

namespace {

constexpr int kGemmNotFound = -1;
constexpr int kBlasError = 10000;

}  // namespace

absl::StatusOr<bool> GatedProduct(CudaStream& stream, const GatedProductCall& call) {
  if (call.m < 0 || call.n < 0 || call.k < 0 || call.x_stride < call.k || call.w_stride < call.k ||
      call.y_stride < call.n) {
    return InvalidArgument("gated product on a GPU: ", call.m, " x ", call.n, " x ", call.k, " with strides ",
                           call.x_stride, ", ", call.w_stride, " and ", call.y_stride);
  }
  if (call.m == 0 || call.n == 0) return true;
  if (!AllThere({call.x, call.w, call.y})) return InvalidArgument("gated product on a GPU: x, w or y is null");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const CudaDevice& device = stream.device();
  const DeviceLimits limits = device.limits();
  const int error = device.library()->gated_product(&call, &limits, stream.handle());
  if (error == kProductRefused) return false;
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": gated product"));
  return true;
}

absl::StatusOr<std::unique_ptr<CudaGemm>> CudaGemm::Create(CudaDevice& device, size_t workspace_bytes) {
  void* handle = nullptr;
  char text[1024] = {};
  const int error = device.library()->gemm_open(device.index(), workspace_bytes, &handle, text, sizeof(text));
  if (error == kGemmNotFound) return FailedPrecondition(device.name(), ": ", text);
  if (error >= kBlasError)
    return Internal(device.name(), ": cuBLASLt does not start (status ", error - kBlasError, ")");
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": workspace of the matrix products"));
  return std::unique_ptr<CudaGemm>(new CudaGemm(device, handle));
}

CudaGemm::~CudaGemm() { device_.library()->gemm_close(handle_); }

absl::Status CudaGemm::Run(CudaStream& stream, const GemmCall& call) {
  if (call.m < 0 || call.n < 0 || call.k < 1 || call.x_stride < call.k || call.w_stride < call.k ||
      call.y_stride < call.n) {
    return InvalidArgument("gemm on a GPU: ", call.m, " x ", call.n, " x ", call.k, " with strides ", call.x_stride,
                           ", ", call.w_stride, ", ", call.y_stride);
  }
  const int64_t most = (call.m - 1) * call.y_stride + call.n;
  if (call.parts < 0 || (call.parts > 1 && (call.k % call.parts != 0 || call.part_step < most || call.y_is_f32 == 0 ||
                                            call.accumulate != 0 || call.bias != nullptr))) {
    return InvalidArgument("gemm on a GPU: ", call.parts, " parts of ", call.k, " columns, ", call.part_step,
                           " elements apart; parts are equal, in f32, do not overlap and are not added to anything");
  }
  if (call.m == 0 || call.n == 0) return absl::OkStatus();
  if (!AllThere({call.x, call.w, call.y})) return InvalidArgument("gemm on a GPU: x, w or y is null");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = device_.library()->gemm_run(handle_, &call, stream.handle());
  if (error >= kBlasError) {
    return Internal(device_.name(), ": cuBLASLt refuses ", call.m, " x ", call.n, " x ", call.k, " (status ",
                    error - kBlasError, ")");
  }
  return device_.library().Check(error, device_.name() + ": gemm");
}

}  // namespace dovetail::kernels::cuda
