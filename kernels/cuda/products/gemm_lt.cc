#include "kernels/cuda/products/gemm_lt.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "base/mutex.h"
#include "kernels/cuda/products/blas_lt.h"
#include "kernels/cuda/products/in_order_check.h"
#include "kernels/cuda/products/in_order_product.h"
#include "kernels/cuda/products/product_table.h"
#include "kernels/cuda/products/skinny_gemm.h"
#include "kernels/cuda/runtime/open_library.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kNotFound = -1;
constexpr int kCandidates = 8;           // algorithms that are timed
constexpr int kTimedRuns = 4;            // of each, one behind the other
constexpr int64_t kMostTunedRows = 256;  // of more rows each number has a shape of its own
constexpr size_t kClearedL2s = 4;        // weights of more L2s than this leave nothing of themselves there
constexpr int64_t kInOrderKey = -1;      // at the end of a table's key
constexpr int kChoice = 2;               // how the above choose; files of what was chosen otherwise are not read

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, bool, int, int64_t, int>;

Key KeyOf(const GemmCall& call) {
  return {call.m,
          call.n,
          call.k,
          call.x_stride,
          call.w_stride,
          call.y_stride,
          static_cast<int>(call.type),
          call.y_is_f32,
          call.bias != nullptr,
          call.parts,
          call.part_step,
          call.in_order};
}

// The key of such products whatever their m.
Key ShapeOf(GemmCall call) {
  call.m = call.part_step = 0;
  return KeyOf(call);
}

struct Gemm {
  Blas blas;
  cublasLtHandle_t handle = nullptr;
  int device = 0;
  DeviceLimits limits;
  size_t l2_bytes = 0;
  Mutex mutex;
  std::map<void*, void*> workspaces ABSL_GUARDED_BY(mutex);  // by stream: products of two streams run at the same time
  void* unused_workspace ABSL_GUARDED_BY(mutex) = nullptr;   // for the first stream
  size_t workspace_bytes = 0;
  std::map<Key, Plan> plans ABSL_GUARDED_BY(mutex);
  std::map<Key, InOrderAlgorithms> in_order ABSL_GUARDED_BY(mutex);  // by shape
  std::unique_ptr<ProductTable> table;
  // compute-sanitizer's initcheck does not see what cuBLASLt stores: with DOVETAIL_FILL_PRODUCTS set, results are
  // filled first, so that whatever it still reports is no product's (docs/testing.md).
  bool fill_first = false;
};

// Memory and marks of one tuning; all or nothing.
struct Tuning {
  void* y = nullptr;  // so that no result is touched
  cudaEvent_t begin = nullptr, end = nullptr;
  explicit Tuning(size_t bytes) {
    if (cudaMalloc(&y, bytes) != cudaSuccess || cudaEventCreate(&begin) != cudaSuccess ||
        cudaEventCreate(&end) != cudaSuccess) {
      cudaGetLastError();
    }
  }
  ~Tuning() {
    if (y != nullptr) cudaFree(y);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
  bool ok() const { return y != nullptr && end != nullptr; }
};

// A product by one algorithm as a recorded step has it, some times over. Some algorithms count tiles in a word that is
// zeroed before: in a stream that hides behind the launch, in a graph it is a node of its own with a gap of some
// microseconds behind it. Others are two kernels, of which a graph hides nothing either.
class RecordedProducts {
 public:
  // `cleared` bytes of the tuning's memory are written before each.
  RecordedProducts(const Gemm& gemm, const GemmCall& call, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                   void* workspace, const Tuning& tuning, size_t cleared, cudaStream_t stream)
      : stream_(stream) {
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return;
    const float one = 1, zero = 0;
    bool ran = true;
    for (int run = 0; run < kTimedRuns && ran; ++run) {
      if (cleared > 0) cudaMemsetAsync(tuning.y, 0, cleared, stream);
      ran = gemm.blas.matmul(gemm.handle, plan.desc, &one, call.w, plan.w, call.x, plan.x, &zero, tuning.y, plan.y,
                             tuning.y, plan.y, &algorithm, workspace, gemm.workspace_bytes,
                             stream) == CUBLAS_STATUS_SUCCESS;
    }
    cudaGraph_t recorded = nullptr;
    ran = cudaStreamEndCapture(stream, &recorded) == cudaSuccess && ran;
    if (ran && cudaGraphInstantiate(&graph_, recorded, 0) != cudaSuccess) graph_ = nullptr;
    if (recorded != nullptr) cudaGraphDestroy(recorded);
  }
  ~RecordedProducts() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  RecordedProducts(const RecordedProducts&) = delete;
  RecordedProducts& operator=(const RecordedProducts&) = delete;

  // Waits for them. False: they cannot run.
  bool Time(const Tuning& tuning, float& milliseconds) const {
    return graph_ != nullptr && cudaEventRecord(tuning.begin, stream_) == cudaSuccess &&
           cudaGraphLaunch(graph_, stream_) == cudaSuccess && cudaEventRecord(tuning.end, stream_) == cudaSuccess &&
           cudaEventSynchronize(tuning.end) == cudaSuccess &&
           cudaEventElapsedTime(&milliseconds, tuning.begin, tuning.end) == cudaSuccess;
  }

 private:
  const cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

// Takes what is fastest in a recorded step of what cuBLASLt proposes: its first choice is not that for some shapes of
// few rows. Waits for the stream; not while it records a graph, nor without memory for another result: then the first
// choice stays, and false.
bool Tune(Gemm& gemm, const GemmCall& call, std::span<const cublasLtMatmulHeuristicResult_t> candidates, void* opaque,
          Plan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(gemm.mutex) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) return false;
  const size_t y_elements = static_cast<size_t>(HasParts(call) ? call.parts * call.part_step : call.m * call.y_stride);
  const size_t y_bytes = y_elements * (call.y_is_f32 ? 4 : 2);
  // Between two products of a step many others read their weights: none finds its own in the L2.
  const size_t w_bytes = static_cast<size_t>(call.n) * call.w_stride * 2;
  const bool clears = call.w_is_new == 0 && w_bytes < kClearedL2s * gemm.l2_bytes;
  const Tuning tuning(clears ? std::max(y_bytes, gemm.l2_bytes) : y_bytes);
  if (!tuning.ok()) return false;
  float best = 0;
  for (const cublasLtMatmulHeuristicResult_t& candidate : candidates) {
    const RecordedProducts products(gemm, call, plan, candidate.algo, gemm.workspaces.at(opaque), tuning,
                                    clears ? gemm.l2_bytes : 0, stream);
    float warm_up = 0, first = 0, second = 0;
    if (!products.Time(tuning, warm_up) || !products.Time(tuning, first) || !products.Time(tuning, second)) {
      cudaGetLastError();
      continue;
    }
    const float least = std::min(first, second);
    if (best == 0 || least < best) {
      best = least;
      plan.algorithm = candidate.algo;
    }
  }
  return best > 0;
}

static_assert(sizeof(cublasLtMatmulAlgo_t) == ProductTable::kAlgorithmBytes);

// As an earlier process chose, if it is still among the candidates; else by time, for all that follow.
void Choose(Gemm& gemm, const GemmCall& call, std::span<const cublasLtMatmulHeuristicResult_t> candidates, void* stream,
            Plan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(gemm.mutex) {
  ProductTable::Key key{call.m,
                        call.n,
                        call.k,
                        call.x_stride,
                        call.w_stride,
                        call.y_stride,
                        static_cast<int64_t>(call.type),
                        call.y_is_f32,
                        call.bias != nullptr};
  if (HasParts(call)) key.insert(key.end(), {call.parts, call.part_step});
  if (call.in_order != 0) key.push_back(kInOrderKey);
  if (const ProductTable::Algorithm* known = gemm.table->Find(key); known != nullptr) {
    for (const cublasLtMatmulHeuristicResult_t& candidate : candidates) {
      if (std::memcmp(&candidate.algo, known->data(), known->size()) != 0) continue;
      plan.algorithm = candidate.algo;
      return;
    }
  }
  if (!Tune(gemm, call, candidates, stream, plan)) return;
  ProductTable::Algorithm chosen;
  std::memcpy(chosen.data(), &plan.algorithm, chosen.size());
  gemm.table->Add(key, chosen);
}

int MakePlan(Gemm& gemm, const GemmCall& call, void* stream, Plan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(gemm.mutex) {
  const Blas& blas = gemm.blas;
  if (const int error = MakeLayouts(blas, call, plan); error != 0) return error;
  cublasLtMatmulPreference_t preference = nullptr;
  BLAS_OR_RETURN(blas.preference_create(&preference));
  cublasStatus_t status = blas.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &gemm.workspace_bytes, sizeof(gemm.workspace_bytes));
  // Parts of a sum are never rounded to the output's type.
  const uint32_t reductions =
      call.in_order != 0 ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status =
        blas.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions));
  }
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int count = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status =
        blas.heuristic(gemm.handle, plan.desc, plan.w, plan.x, plan.y, plan.y, preference, kCandidates, found, &count);
  }
  blas.preference_destroy(preference);
  if (call.in_order != 0) {
    if (status != CUBLAS_STATUS_SUCCESS) count = 0;
    const int most = call.m <= kMostTunedRows ? kCandidates : 1;
    count =
        KeepInOrder(blas, gemm.handle, call, gemm.workspace_bytes, gemm.in_order[ShapeOf(call)], most, found, count);
    if (count == 0) return IsInOrderProduct(call) ? 0 : kBlasError + static_cast<int>(CUBLAS_STATUS_NOT_SUPPORTED);
  }
  BLAS_OR_RETURN(status);
  if (count == 0) return kBlasError + static_cast<int>(CUBLAS_STATUS_NOT_SUPPORTED);
  plan.algorithm = found[0].algo;
  plan.has_algorithm = true;
  if (call.m <= kMostTunedRows && count > 1) Choose(gemm, call, std::span(found, count), stream, plan);
  return 0;
}

// Not while the stream records its first product.
int WorkspaceOf(Gemm& gemm, void* stream, void*& workspace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(gemm.mutex) {
  void*& own = gemm.workspaces[stream];
  if (own == nullptr) own = std::exchange(gemm.unused_workspace, nullptr);
  if (own == nullptr) {
    if (const cudaError_t error = cudaMalloc(&own, gemm.workspace_bytes); error != cudaSuccess) {
      gemm.workspaces.erase(stream);
      cudaGetLastError();
      return static_cast<int>(error);
    }
  }
  workspace = own;
  return 0;
}

}  // namespace

int GemmOpen(int device, size_t workspace_bytes, void** out, char* text, size_t text_bytes) {
  *out = nullptr;
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return static_cast<int>(error);
  std::string tried;
  void* library = OpenLibrary("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), CUBLAS_VER_MAJOR, tried);
  auto gemm = std::make_unique<Gemm>();
  if (library == nullptr || !FindAll(library, gemm->blas)) {
    std::snprintf(text, text_bytes,
                  "cuBLASLt %d is not installed (tried %s); install NVIDIA's CUDA toolkit or its Python package "
                  "nvidia-cublas, or add the library's folder to LD_LIBRARY_PATH",
                  CUBLAS_VER_MAJOR, tried.c_str());
    return kNotFound;
  }
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess)
    return static_cast<int>(error);
  const std::string kind =
      std::string("-") + properties.name + "-" + std::to_string(gemm->blas.version()) + "-" + std::to_string(kChoice);
  gemm->table = std::make_unique<ProductTable>(ProductTable::DefaultPath(kind));
  void* workspace = nullptr;
  if (const cudaError_t error = cudaMalloc(&workspace, workspace_bytes); error != cudaSuccess) {
    cudaGetLastError();
    return static_cast<int>(error);
  }
  {
    const MutexLock lock(gemm->mutex);
    gemm->unused_workspace = workspace;
  }
  gemm->fill_first = std::getenv("DOVETAIL_FILL_PRODUCTS") != nullptr;
  gemm->device = device;
  gemm->limits = {.multiprocessors = properties.multiProcessorCount,
                  .shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
                  .major = properties.major,
                  .minor = properties.minor};
  gemm->l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  gemm->workspace_bytes = workspace_bytes;
  if (const cublasStatus_t status = gemm->blas.create(&gemm->handle); status != CUBLAS_STATUS_SUCCESS) {
    cudaFree(workspace);
    return kBlasError + static_cast<int>(status);
  }
  *out = gemm.release();
  return 0;
}

int GemmClose(void* opaque) {
  auto* gemm = static_cast<Gemm*>(opaque);
  {
    const MutexLock lock(gemm->mutex);
    for (auto& [key, plan] : gemm->plans) Destroy(gemm->blas, plan);
    gemm->blas.destroy(gemm->handle);
    cudaSetDevice(gemm->device);
    cudaFree(gemm->unused_workspace);
    for (const auto& [stream, workspace] : gemm->workspaces) cudaFree(workspace);
  }
  delete gemm;
  return 0;
}

int GemmRun(void* opaque, const GemmCall* call, void* stream) {
  auto& gemm = *static_cast<Gemm*>(opaque);
  if (call->m == 0 || call->n == 0) return 0;
  if (call->w_is_new == 0 && call->in_order == 0 && !HasParts(*call) && IsSkinnyGemm(*call, gemm.limits))
    return call->only_choose != 0 ? 0 : LaunchSkinnyGemm(*call, gemm.limits, stream);
  const MutexLock lock(gemm.mutex);
  void* workspace = nullptr;
  if (const int error = WorkspaceOf(gemm, stream, workspace); error != 0) return error;
  const Key key = KeyOf(*call);
  auto found = gemm.plans.find(key);
  if (found == gemm.plans.end()) {
    Plan plan;
    if (const int error = MakePlan(gemm, *call, stream, plan); error != 0) {
      Destroy(gemm.blas, plan);
      return error;
    }
    found = gemm.plans.emplace(key, plan).first;
  }
  if (call->only_choose != 0) return 0;
  const Plan& plan = found->second;
  if (!plan.has_algorithm) return LaunchInOrderProduct(*call, stream);
  if (call->bias != nullptr) {
    BLAS_OR_RETURN(gemm.blas.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call->bias, sizeof(call->bias)));
  }
  if (gemm.fill_first && call->accumulate == 0) {
    const size_t element = call->y_is_f32 ? 4 : 2;
    for (int part = 0; part < std::max(call->parts, 1); ++part) {
      const cudaError_t error =
          cudaMemset2DAsync(static_cast<std::byte*>(call->y) + part * call->part_step * element,
                            call->y_stride * element, 0, call->n * element, call->m, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return static_cast<int>(error);
    }
  }
  const float one = 1, beta = call->accumulate ? 1 : 0;
  BLAS_OR_RETURN(gemm.blas.matmul(gemm.handle, plan.desc, &one, call->w, plan.w, call->x, plan.x, &beta, call->y,
                                  plan.y, call->y, plan.y, &plan.algorithm, workspace, gemm.workspace_bytes,
                                  static_cast<cudaStream_t>(stream)));
  return 0;
}

}  // namespace dovetail::kernels::cuda
