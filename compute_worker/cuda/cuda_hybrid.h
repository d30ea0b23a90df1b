#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compute_worker/cuda/cuda_hybrid_model.h"
#include "kernels/cuda/products/cuda_product.h"
#include "model/loaded_model.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// The dense steps of hybrids and of mixtures of experts on a GPU: what goes into linear states, latent keys and values,
// what gates their results, experts. CudaDense calls it in the order of the model's steps; everything goes into its
// stream, nothing waits, and all of it may be recorded. Activations have the wire's 16 bits; routers and gates of
// states are f32. Owned by CudaDense and used on its node's event loop only.
class CudaHybrid {
 public:
  struct Shape {
    int64_t rows = 0;  // of the largest step
    int micro_batches = 1;
    kernels::cuda::WireType type = kernels::cuda::WireType::kBF16;
  };
  // Takes the memory that a step of shape.rows needs: kResourceExhausted. `weights` by the model's step, null where a
  // step has none. All outlive it.
  static absl::StatusOr<std::unique_ptr<CudaHybrid>> Create(kernels::cuda::CudaDevice& device,
                                                            const model::LoadedModel& model,
                                                            const proto::AttentionTable& table,
                                                            std::vector<const CudaHybridWeights*> weights,
                                                            kernels::cuda::CudaStream& stream,
                                                            kernels::cuda::CudaProduct& product, const Shape& shape);

  // h of the layer, [rows, hidden], kept for gates and for a second op of the layer.
  absl::Status KeepInput(int micro_batch, const void* h, int64_t rows);

  // Step `index`, a QueryProjection of a linear state, from the kept h and its q, k, v weights below each other: q to
  // `query`, k, v and gates to `key_value`, as the payloads of whole sequences lie.
  absl::Status StateHeads(int micro_batch, size_t index, const CudaProjection& qkv, int64_t rows, std::byte* query,
                          std::byte* key_value);
  // Where a linear op's gates begin in its key_value tensor, [rows, heads, gates] f32.
  static int64_t GatesAt(const proto::SoftmaxSpec& spec, int64_t rows);

  // Step `index` with latent keys and values: rows of [q | k | v] to `qkv`, from h.
  absl::Status LatentHeads(size_t index, const CudaProjection& q, const void* h, int64_t rows, std::byte* qkv);

  // The OutputProjection at `index`: what was attended, gated and normed; valid until the next call.
  absl::StatusOr<const void*> Gated(int micro_batch, size_t index, const void* attended, int64_t rows);

  // act(gate) * up of a GatedMlp that is not plain, [rows][width] to `out`.
  absl::Status Activate(model::Activation activation, const void* gate_up, void* out, int64_t rows, int64_t width);

  // The ExpertMlp at `index` (cuda_experts.cc). Route reads the residual stream before it begins anew; Run adds to it.
  absl::Status Route(size_t index, const float* x, const float* norm, int64_t rows);
  absl::Status RunExperts(size_t index, const void* h, float* x, int64_t rows);

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  CudaHybrid(kernels::cuda::CudaDevice& device, const model::LoadedModel& model, const proto::AttentionTable& table,
             std::vector<const CudaHybridWeights*> weights, kernels::cuda::CudaStream& stream,
             kernels::cuda::CudaProduct& product, const Shape& shape)
      : device_(device),
        model_(model),
        table_(table),
        weights_(std::move(weights)),
        stream_(stream),
        product_(product),
        shape_(shape) {}
  absl::Status Allocate();
  void WidenFor(size_t index);
  absl::Status AllocateExperts();
  absl::Status ComputeGates(const model::StateGates& gates, const CudaHybridWeights& weights,
                            const proto::SoftmaxSpec& spec, const void* h, int64_t rows, float* out);

  enum class Result { kWire, kF32, kAdded };  // in 16 bits, in f32, added to what is there in f32
  absl::Status Multiply(const CudaProjection& w, const void* in, int64_t rows, Result result, void* out,
                        int64_t out_step = 0);
  absl::Status MultiplyLowRank(const CudaLowRank& w, const void* in, int64_t rows, Result result, void* out);
  // out += scale in W; through `aside` where it is not 1.
  absl::Status AddProduct(const CudaProjection& w, const void* in, int64_t rows, float scale, float* out);
  absl::Status RunPairs(const model::ExpertMlp& step, const CudaHybridWeights& weights, const void* in, int64_t width,
                        int64_t rows);
  absl::Status AddShared(const model::ExpertMlp& step, const CudaHybridWeights& weights, const void* h, float* x,
                         int64_t rows);
  int64_t hidden() const { return model_.config().hidden_size; }

  kernels::cuda::CudaDevice& device_;
  const model::LoadedModel& model_;
  const proto::AttentionTable& table_;
  const std::vector<const CudaHybridWeights*> weights_;
  kernels::cuda::CudaStream& stream_;
  kernels::cuda::CudaProduct& product_;
  const Shape shape_;

  // Elements of a row of each scratch, over the steps of the model.
  struct Widths {
    int64_t heads = 0, low = 0, gates = 0, gated = 0, latent = 0;
    int64_t experts = 0, chosen = 0, expert_gate_up = 0, expert_act = 0, expert_out = 0, shared_gate_up = 0;
    int64_t experts_latent = 0;
  } widths_;
  std::vector<BufferPtr> kept_;  // by micro-batch: h
  BufferPtr heads_, factor_, low_, gates_, rates_, gate_, gated_, latent_;
  BufferPtr chosen_, route_weight_, slot_, member_, tiles_;
  BufferPtr pair_gate_up_, pair_act_, pair_out_, experts_latent_, experts_latent_sum_, aside_;
};

}  // namespace dovetail::compute
