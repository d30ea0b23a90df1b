#include "kernels/cuda/products/in_order_check.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "kernels/cuda/products/in_order_product.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int64_t kComparedRows = 64;

// While it lives, this thread may allocate memory although one of its streams records a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A product of few rows, its result as it should be, and memory for results that are compared with it.
class Probe {
 public:
  Probe(const Blas& blas, cublasLtHandle_t handle, const GemmCall& call, size_t workspace_bytes)
      : blas_(blas), handle_(handle), call_(call), workspace_bytes_(workspace_bytes) {
    call_.m = std::min(call.m, kComparedRows);
    call_.accumulate = 0;
    if (HasParts(call)) call_.part_step = call_.m * call_.y_stride;
  }
  ~Probe() {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    Destroy(blas_, plan_);
    for (void* const memory : {x_, want_, got_, unlike_, workspace_}) cudaFree(memory);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaGetLastError();
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // False: nothing can be compared.
  bool Prepare() {
    if (!IsInOrderProduct(call_) || MakeLayouts(blas_, call_, plan_) != 0) return false;
    const size_t x_elements = static_cast<size_t>(call_.m * call_.x_stride);
    const size_t y_elements = static_cast<size_t>(std::max<int64_t>(call_.parts, 1) * call_.m * call_.y_stride);
    y_bytes_ = (y_elements * (call_.y_is_f32 != 0 ? 4 : 2) + 3) / 4 * 4;
    if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess ||
        cudaMalloc(&x_, x_elements * 2) != cudaSuccess || cudaMalloc(&want_, y_bytes_) != cudaSuccess ||
        cudaMalloc(&got_, y_bytes_) != cudaSuccess || cudaMalloc(&unlike_, sizeof(uint32_t)) != cudaSuccess ||
        cudaMalloc(&workspace_, workspace_bytes_) != cudaSuccess)
      return false;
    call_.x = x_;
    call_.y = want_;
    return LaunchSpread(call_.type, x_, x_elements, stream_) == 0 &&
           cudaMemsetAsync(want_, 0, y_bytes_, stream_) == cudaSuccess && LaunchInOrderProduct(call_, stream_) == 0 &&
           cudaStreamSynchronize(stream_) == cudaSuccess;
  }

  bool Agrees(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1, zero = 0;
    uint32_t unlike = 1;
    const bool ran =
        cudaMemsetAsync(got_, 0, y_bytes_, stream_) == cudaSuccess &&
        cudaMemsetAsync(unlike_, 0, sizeof(unlike), stream_) == cudaSuccess &&
        blas_.matmul(handle_, plan_.desc, &one, call_.w, plan_.w, call_.x, plan_.x, &zero, got_, plan_.y, got_, plan_.y,
                     &algorithm, workspace_, workspace_bytes_, stream_) == CUBLAS_STATUS_SUCCESS &&
        LaunchCountUnlike(static_cast<const uint32_t*>(want_), static_cast<const uint32_t*>(got_), y_bytes_ / 4,
                          static_cast<uint32_t*>(unlike_), stream_) == 0 &&
        cudaMemcpyAsync(&unlike, unlike_, sizeof(unlike), cudaMemcpyDeviceToHost, stream_) == cudaSuccess &&
        cudaStreamSynchronize(stream_) == cudaSuccess;
    return ran && unlike == 0;
  }

 private:
  const Blas& blas_;
  const cublasLtHandle_t handle_;
  GemmCall call_;
  const size_t workspace_bytes_;
  size_t y_bytes_ = 0;
  Plan plan_;
  cudaStream_t stream_ = nullptr;
  void *x_ = nullptr, *want_ = nullptr, *got_ = nullptr, *unlike_ = nullptr, *workspace_ = nullptr;
};

}  // namespace

int KeepInOrder(const Blas& blas, cublasLtHandle_t handle, const GemmCall& call, size_t workspace_bytes,
                InOrderAlgorithms& known, int most, cublasLtMatmulHeuristicResult_t* found, int count) {
  const RelaxedCapture relaxed;
  std::optional<Probe> probe;
  int kept = 0;
  for (int i = 0; i < count && kept < most; ++i) {
    InOrderAlgorithms::key_type bytes;
    std::memcpy(bytes.data(), &found[i].algo, bytes.size());
    auto is_known = known.find(bytes);
    if (is_known == known.end()) {
      if (!probe && !probe.emplace(blas, handle, call, workspace_bytes).Prepare()) return 0;
      is_known = known.emplace(bytes, probe->Agrees(found[i].algo)).first;
    }
    if (is_known->second) std::swap(found[kept++], found[i]);
  }
  return kept;
}

}  // namespace dovetail::kernels::cuda
