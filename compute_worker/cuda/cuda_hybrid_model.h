#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/products/cuda_weights.h"
#include "kernels/device.h"
#include "model/loaded_model.h"

namespace dovetail::compute {

// y = x W^T + bias on a GPU. Device pointers.
// Threads: immutable once loaded.
struct CudaProjection {
  kernels::cuda::CudaWeights weights;     // [out][in]
  std::unique_ptr<kernels::Buffer> bias;  // [out] in the type of the product's result, or null
};

struct CudaLowRank {
  CudaProjection low;  // empty: `out` alone
  CudaProjection out;
};

// What steps of hybrids and experts need in addition to CudaStep's members; empty where a step has none. f32 unless a
// projection.
// Threads: immutable once loaded.
struct CudaHybridWeights {
  using BufferPtr = std::unique_ptr<kernels::Buffer>;

  // QueryProjection, with the KeyValueProjection behind it.
  CudaLowRank decay;
  CudaProjection rate;
  BufferPtr decay_bias, decay_factor;
  CudaProjection v_factor;
  CudaProjection latent_down, latent_k, latent_v;
  BufferPtr latent_norm;
  // OutputProjection.
  CudaLowRank gate;
  BufferPtr gate_norm;
  // ExpertMlp. Experts lie one after the other: [experts][gate rows, then up rows][in], [experts][out][intermediate].
  BufferPtr router, router_bias, selection_bias;
  kernels::cuda::CudaWeights expert_gate_up, expert_down;
  BufferPtr expert_gate_up_bias, expert_down_bias;
  CudaProjection experts_latent_down, experts_latent_up;
  CudaProjection shared_gate_up, shared_down;
  BufferPtr shared_gate;
};

// Takes a model's tensors to the GPU. The caller owns what it returns.
// Threads: thread-compatible; the one thread that loads the model uses it.
class CudaWeightReader {
 public:
  virtual ~CudaWeightReader() = default;
  // Several projections of one input below each other; bias in f32, or in the weights' type.
  virtual absl::StatusOr<CudaProjection> Stack(const std::vector<const model::Projection*>& parts, bool f32_bias) = 0;
  // The same of all experts, with `each` projections of one: 2 are a gate and what it gates. Kept in few bits only
  // where the kernels of experts read them; bias in f32.
  virtual absl::StatusOr<CudaProjection> StackExperts(const std::vector<const model::Projection*>& parts, int each) = 0;
  virtual absl::StatusOr<std::unique_ptr<kernels::Buffer>> Upload(const std::vector<float>& values) = 0;
  // A projection's weights in f32.
  virtual absl::StatusOr<std::unique_ptr<kernels::Buffer>> FloatMatrix(const model::Projection& projection) = 0;
  virtual absl::StatusOr<std::unique_ptr<kernels::Buffer>> Norm(const model::RmsNorm& norm) = 0;
};

// Whether a step needs more than a dense model's.
bool IsHybridStep(const model::LayerStep& step);
// What `model.steps[index]` needs beyond CudaStep's members (of a QueryProjection: with the next step's).
// Errors: the reader's.
// Threads: those of the reader.
absl::StatusOr<std::unique_ptr<CudaHybridWeights>> LoadHybridStep(const model::LoadedModel& model, size_t index,
                                                                  CudaWeightReader& reader);

// kUnimplemented: a hybrid or a mixture of experts of shapes that do not run on a GPU.
absl::Status SupportsHybrid(const model::ModelConfig& config);
// Weights of all layers, of any model.
uint64_t LayerElements(const model::ModelConfig& config);

}  // namespace dovetail::compute
