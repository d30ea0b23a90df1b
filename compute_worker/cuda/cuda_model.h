#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "compute_worker/cuda/cuda_hybrid_model.h"
#include "compute_worker/dense_backend.h"
#include "kernels/cuda/products/cuda_weights.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "model/loaded_model.h"

namespace dovetail::compute {

// What a step of the model's list needs there; empty where the step has none. By the step's index.
struct CudaStep {
  CudaProjection first;   // QueryProjection: q, k and v below each other; OutputProjection: o; GatedMlp: gate, then up
  CudaProjection second;  // GatedMlp: down
  std::unique_ptr<kernels::Buffer> norm, post_norm, q_norm, k_norm;  // f32; k_norm at QueryProjection
  std::unique_ptr<CudaHybridWeights> hybrid;                         // null in a dense model's steps
};

// --gpu-weights: what becomes of weights that a file has in 4 or 8 bits. Kept, they take about as much memory, and
// steps of few tokens are faster, since they read less; prompts are slower, since weights are unpacked for each.
enum class GpuWeights {
  kAuto,  // kept where they would take more than half of the free memory in 16 bits
  kKeep,
  kDequantise,  // once, as they are loaded
};

// What to say where weights of `needed` bytes (in 16 bits, or kept as their file has them) do not fit on a GPU: which
// types would, and what else helps.
// Threads: pure.
std::string WeightsThatFit(uint64_t needed, bool keep, uint64_t free_bytes, uint64_t total_bytes);

// A model's weights on a GPU, in one 16-bit type or as the file has them, and the layers over them. `model`, read with
// WeightFormat::kElsewhere, and `device` outlive it.
// Threads: immutable once loaded.
class CudaModel final : public DenseBackendFactory {
 public:
  // OK if such a model, with K, V and activations in `type`, can run here; else kUnimplemented names what is missing.
  static absl::Status Supports(const model::ModelConfig& config, DType type);
  // Bytes of all weights there, in 16 bits.
  static uint64_t WeightBytes(const model::ModelConfig& config);
  // The same where those in 4 and 8 bits are kept, and of what they are unpacked to. `random` as in Load. kNotFound as
  // Checkpoint::Find.
  static absl::StatusOr<uint64_t> KeptWeightBytes(const model::Checkpoint& checkpoint, bool random = false);
  // What kAuto becomes with so much memory free.
  static absl::StatusOr<bool> Keeps(GpuWeights how, const model::Checkpoint& checkpoint, uint64_t free_bytes);

  // kUnimplemented as Supports; kResourceExhausted names what is needed, what is free and what would fit.
  // `random`: weights are made there, and none are read; with kKeep as if they came in 4 bits with scales and offsets.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Load(kernels::cuda::CudaDevice& device,
                                                         const model::LoadedModel& model, DType type, bool random,
                                                         GpuWeights how, const model::LoadProgress& progress);

  uint32_t PromptBlocks(const proto::AttentionTable& table, int max_step_tokens,
                        std::optional<uint64_t> bytes) const override;
  absl::Status RunsLinearPrompts(const proto::AttentionTable& table) const override;
  absl::StatusOr<std::unique_ptr<DenseBackend>> Create(const proto::AttentionTable& table,
                                                       const ComputeWorkerOptions& options,
                                                       exchange::SharedGpu* shared_gpu) const override;

  kernels::cuda::CudaDevice& device() const { return device_; }
  const model::LoadedModel& model() const { return model_; }
  kernels::cuda::WireType type() const { return type_; }
  const std::vector<CudaStep>& steps() const { return steps_; }
  bool keeps() const { return keeps_; }                                       // whether any weights are in 4 or 8 bits
  const kernels::cuda::CudaWeights& embedding() const { return embedding_; }  // [vocab][hidden]
  const kernels::cuda::CudaWeights& head() const { return head_.rows() > 0 ? head_ : embedding_; }
  const float* final_norm() const { return reinterpret_cast<const float*>(final_norm_->data()); }
  size_t weight_bytes() const { return weight_bytes_; }
  size_t expert_scratch_bytes() const { return expert_scratch_bytes_; }  // for ExpertProduct; 0: no experts are kept

 private:
  CudaModel(kernels::cuda::CudaDevice& device, const model::LoadedModel& model, kernels::cuda::WireType type)
      : device_(device), model_(model), type_(type) {}
  class Reader;

  kernels::cuda::CudaDevice& device_;
  const model::LoadedModel& model_;
  const kernels::cuda::WireType type_;
  std::vector<CudaStep> steps_;
  kernels::cuda::CudaWeights embedding_, head_;  // head_ is empty if it is the embedding
  std::unique_ptr<kernels::Buffer> final_norm_;
  size_t weight_bytes_ = 0, expert_scratch_bytes_ = 0;
  bool keeps_ = false;
};

// As kernels name the types.
inline kernels::cuda::WireType WireTypeOf(DType type) { return static_cast<kernels::cuda::WireType>(type); }

}  // namespace dovetail::compute
