#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include "kernels/cuda/prompts/prompt_dnn.h"

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "kernels/cuda/runtime/open_library.h"

namespace cudnn_frontend {
// cuDNN's headers look every function up here. Set once, by DnnOpen.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace dovetail::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;

enum Uid : int64_t { kQ = 1, kK, kV, kO, kQAt, kKAt, kVAt, kOAt, kTokens, kSums };

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace_bytes = 0;
};

struct Dnn {
  cudnnHandle_t handle = nullptr;
  int device = 0;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// cuDNN itself, opened once for the process; null: not found. Any thread.
void* OpenCudnn(std::string& tried) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = OpenLibrary("libcudnn.so.9", CUDART_VERSION / 1000, tried);
  return fe::cudnn_dlhandle;
}

std::shared_ptr<fe::graph::Tensor_attributes> Integers(fe::graph::Graph& graph, Uid uid, int64_t count,
                                                       const std::string& name) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({count, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(fe::DataType_t::INT32));
}

// Rows of `heads` vectors that lie one after the other; where a sequence's begin is told by offsets, unless they are
// even.
void SetRows(fe::graph::Graph& graph, const PromptCall& call, Uid uid, Uid at, int heads, int dim, const char* name,
             fe::graph::Tensor_attributes& rows) {
  const int64_t row = int64_t{heads} * dim;
  rows.set_name(name)
      .set_uid(uid)
      .set_dim({call.batch, heads, call.most_tokens, dim})
      .set_stride({call.most_tokens * row, dim, row, 1});
  if (call.even == 0) rows.set_ragged_offset(Integers(graph, at, call.batch + 1, std::string(name) + " at"));
}

std::shared_ptr<fe::graph::Tensor_attributes> Rows(fe::graph::Graph& graph, const PromptCall& call, Uid uid, Uid at,
                                                   int heads, int dim, const char* name) {
  fe::graph::Tensor_attributes rows;
  SetRows(graph, call, uid, at, heads, dim, name, rows);
  return graph.tensor(rows);
}

std::unique_ptr<Plan> MakePlan(Dnn& dnn, const PromptCall& call) {
  auto plan = std::make_unique<Plan>();
  plan->graph = std::make_shared<fe::graph::Graph>();
  fe::graph::Graph& graph = *plan->graph;
  graph.set_io_data_type(call.type == WireType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto q = Rows(graph, call, kQ, kQAt, call.q_heads, call.key_dim, "q");
  const auto k = Rows(graph, call, kK, kKAt, call.kv_heads, call.key_dim, "k");
  const auto v = Rows(graph, call, kV, kVAt, call.kv_heads, call.value_dim, "v");
  auto options = fe::graph::SDPA_attributes()
                     .set_name("prompts")
                     .set_generate_stats(call.with_sums != 0)
                     .set_attn_scale(call.scale)
                     .set_causal_mask(true);
  if (call.even == 0) {
    const auto tokens = Integers(graph, kTokens, call.batch, "tokens");
    options.set_padding_mask(true).set_seq_len_q(tokens).set_seq_len_kv(tokens);
  }
  auto [o, stats] = graph.sdpa(q, k, v, options);
  SetRows(graph, call, kO, kOAt, call.q_heads, call.value_dim, "o", *o);
  o->set_output(true);
  if (call.with_sums != 0) {
    stats->set_output(true)
        .set_uid(kSums)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({call.batch, call.q_heads, call.most_tokens, 1})
        .set_stride({int64_t{call.q_heads} * call.most_tokens, call.most_tokens, 1, 1});
  }
  if (graph.build(dnn.handle, {fe::HeurMode_t::A}).is_bad()) return nullptr;
  plan->workspace_bytes = graph.get_workspace_size();
  return plan->workspace_bytes >= 0 ? std::move(plan) : nullptr;
}

constexpr int64_t kLeastWorkspace = 1 << 20;  // far more than plans were seen to need: it seldom grows

int GrowWorkspace(Dnn& dnn, int64_t bytes, cudaStream_t stream) {
  bytes = std::max(bytes, kLeastWorkspace);
  if (bytes <= dnn.workspace_bytes) return 0;
  if (const cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess) return static_cast<int>(error);
  if (dnn.workspace != nullptr) cudaFree(dnn.workspace);
  dnn.workspace = nullptr;
  dnn.workspace_bytes = 0;
  if (const cudaError_t error = cudaMalloc(&dnn.workspace, bytes); error != cudaSuccess) {
    cudaGetLastError();
    return static_cast<int>(error);
  }
  dnn.workspace_bytes = bytes;
  return 0;
}

int Run(Dnn& dnn, Plan& plan, const PromptCall& call, cudaStream_t stream) {
  if (const int error = GrowWorkspace(dnn, plan.workspace_bytes, stream); error != 0) return error;
  if (fe::detail::set_stream(dnn.handle, stream) != CUDNN_STATUS_SUCCESS) return kDnnRefused;
  const auto writable = [](const void* p) { return const_cast<void*>(p); };
  std::unordered_map<int64_t, void*> pack = {
      {kQ, writable(call.q)}, {kK, writable(call.k)}, {kV, writable(call.v)}, {kO, call.o}};
  if (call.even == 0) {
    for (const auto& [uid, at] :
         {std::pair{kQAt, call.q_at}, {kKAt, call.k_at}, {kVAt, call.v_at}, {kOAt, call.o_at}, {kTokens, call.tokens}})
      pack.emplace(uid, writable(at));
  }
  if (call.with_sums != 0) pack.emplace(kSums, call.sums);
  return plan.graph->execute(dnn.handle, pack, dnn.workspace).is_bad() ? kDnnRefused : 0;
}

// CUDA loads a kernel, which takes 1.5 ms and more, when it is first enqueued. Enqueueing it for a graph that never
// runs has it loaded here, not in the first step that runs the plan. What fails here is left to that step.
void LoadKernels(Dnn& dnn, Plan& plan, PromptCall call) {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
      GrowWorkspace(dnn, plan.workspace_bytes, stream) == 0 &&
      cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
    call.q = call.k = call.v = call.o = dnn.workspace;
    call.sums = static_cast<float*>(dnn.workspace);
    call.tokens = call.q_at = call.k_at = call.v_at = call.o_at = static_cast<const int32_t*>(dnn.workspace);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t loaded = nullptr;
    const int enqueued = Run(dnn, plan, call, stream);
    if (cudaStreamEndCapture(stream, &graph) == cudaSuccess && enqueued == 0 &&
        cudaGraphInstantiate(&loaded, graph, 0) == cudaSuccess)
      cudaGraphExecDestroy(loaded);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaGetLastError();
}

}  // namespace

int DnnOpen(int device, void** out, char* text, size_t text_bytes) {
  *out = nullptr;
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return static_cast<int>(error);
  std::string tried;
  if (OpenCudnn(tried) == nullptr) {
    std::snprintf(text, text_bytes,
                  "cuDNN 9 is not installed (tried %s); install it or its Python package nvidia-cudnn-cu%d, or add the "
                  "library's folder to LD_LIBRARY_PATH",
                  tried.c_str(), CUDART_VERSION / 1000);
    return kDnnNotFound;
  }
  try {
    auto dnn = std::make_unique<Dnn>();
    dnn->device = device;
    if (fe::detail::create_handle(&dnn->handle) != CUDNN_STATUS_SUCCESS) {
      std::snprintf(text, text_bytes, "cuDNN does not start on this GPU");
      return kDnnNotFound;
    }
    const size_t version = fe::detail::get_backend_version();
    std::snprintf(text, text_bytes, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    *out = dnn.release();
  } catch (const std::exception& e) {
    std::snprintf(text, text_bytes, "cuDNN cannot be used: %s", e.what());
    return kDnnNotFound;
  }
  return 0;
}

int DnnClose(void* opaque) {
  auto* dnn = static_cast<Dnn*>(opaque);
  cudaSetDevice(dnn->device);
  if (dnn->workspace != nullptr) cudaFree(dnn->workspace);
  fe::detail::destroy_handle(dnn->handle);
  delete dnn;
  return 0;
}

int DnnPlan(void* opaque, const PromptCall* call, void** out) {
  auto& dnn = *static_cast<Dnn*>(opaque);
  *out = nullptr;
  if (const cudaError_t error = cudaSetDevice(dnn.device); error != cudaSuccess) return static_cast<int>(error);
  try {
    std::unique_ptr<Plan> plan = MakePlan(dnn, *call);
    if (plan != nullptr) LoadKernels(dnn, *plan, *call);
    *out = plan.release();
  } catch (const std::exception&) {
  }
  return *out == nullptr ? kDnnRefused : 0;
}

int DnnPlanRelease(void* plan) {
  delete static_cast<Plan*>(plan);
  return 0;
}

int DnnPrompts(void* opaque, void* plan, const PromptCall* call, void* stream) {
  try {
    return Run(*static_cast<Dnn*>(opaque), *static_cast<Plan*>(plan), *call, static_cast<cudaStream_t>(stream));
  } catch (const std::exception&) {
    return kDnnRefused;
  }
}

}  // namespace dovetail::kernels::cuda
