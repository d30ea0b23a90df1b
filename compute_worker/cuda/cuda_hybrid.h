#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_hybrid_model.h"
#include "model/loaded_model.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// The memory of the dense steps of hybrids and of mixtures of experts on a GPU: what goes into linear states, latent
// keys and values, what gates their results, experts. Records name it (launch_records.h). Activations have the wire's
// 16 bits; routers and gates of states are f32.
// Threads: reactor-owned, as CudaDense. Each lane has one.
class CudaHybrid {
 public:
  struct Shape {
    int64_t rows = 0;       // of the largest step
    int micro_batches = 1;  // that take turns in it
  };
  // Takes the memory that a step of shape.rows needs: kResourceExhausted. `weights` by the model's step, null where a
  // step has none. `device` outlives it; nothing else is kept.
  static absl::StatusOr<std::unique_ptr<CudaHybrid>> Create(kernels::cuda::CudaDevice& device,
                                                            const model::LoadedModel& model,
                                                            const proto::AttentionTable& table,
                                                            const std::vector<const CudaHybridWeights*>& weights,
                                                            const Shape& shape);

  // Gives the names of this memory to the batch, which is one of those that take turns.
  void NameTensors(CudaBatch& batch) const;

  // Where a linear op's gates begin in its key_value tensor, [rows, heads, gates] f32.
  static int64_t GatesAt(const proto::SoftmaxSpec& spec, int64_t rows);

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  CudaHybrid(kernels::cuda::CudaDevice& device, int64_t hidden, const Shape& shape)
      : device_(device), hidden_(hidden), shape_(shape) {}
  void WidenFor(const model::LayerStep& step, const CudaHybridWeights& weights, const proto::AttentionTable& table);
  absl::Status Allocate();
  absl::Status AllocateExperts();

  kernels::cuda::CudaDevice& device_;
  const int64_t hidden_;
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
