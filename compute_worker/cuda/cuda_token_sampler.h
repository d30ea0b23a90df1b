#pragma once
#include <array>
#include <memory>
#include <vector>

#include "compute_worker/cpu/token_sampler.h"
#include "compute_worker/cuda/cuda_model.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/runtime/step_work.h"
#include "kernels/cuda/sampling/cuda_sampler.h"

namespace dovetail::compute {

// The end of a step on a GPU: final norm, head and draws there, so that only tokens come back. Rows whose logits
// are asked for, or whose most likely tokens are to be listed, come back whole and are handled on the host.
// Threads: reactor-owned, as CudaDense.
class CudaTokenSampler final : public TokenSampler {
 public:
  static constexpr int kRowsAtOnce = 256;

  // Takes the memory for chunks of min(kRowsAtOnce, most_rows) rows, and for what steps of `micro_batches` draw:
  // kResourceExhausted. All outlive it.
  static absl::StatusOr<std::unique_ptr<CudaTokenSampler>> Create(const CudaModel& model,
                                                                  kernels::cuda::CudaStream& stream,
                                                                  kernels::cuda::CudaProduct& product, int most_rows,
                                                                  int micro_batches);

  // The head's product chooses its algorithm for so many rows; blocks, and computes nothing.
  absl::Status ChooseHead(size_t count);

  // Adds the end of a step to its work, if only the device needs its logits, and one chunk holds it. False: it
  // was left alone. Upload of parameters included; `residual` is device memory.
  absl::StatusOr<bool> Begin(const proto::StepPlan& plan, const float* residual, MicroBatchId id,
                             kernels::cuda::StepWork& work);
  // The work of Begin was launched.
  absl::Status Launched(MicroBatchId id);
  // What `stream` does from here on comes after the draws.
  absl::Status LetWait(kernels::cuda::CudaStream& stream, MicroBatchId id) const {
    return stream.Wait(draws_[id.value()].done);
  }
  bool Done(MicroBatchId id) const;  // Finish would not wait
  // After both: waits, and takes what was drawn.
  absl::Status Finish(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result);
  bool begun(MicroBatchId id) const { return draws_[id.value()].begun; }
  // What the last step of the micro-batch that was begun draws, on the device: by its entries that sample, in order.
  const kernels::cuda::SampleOutput* drawn(MicroBatchId id) const { return draws_[id.value()].sampler->drawn(); }

 protected:
  absl::Status Reserve(size_t most) override;
  // `residual` is device memory.
  absl::Status ComputeLogits(const proto::StepPlan& plan, const float* residual, size_t first, size_t count,
                             const proto::StepResult& result) override;
  absl::StatusOr<float*> HiddenStates(const float* residual, int64_t first, int64_t count) override;
  void HandleRows(const proto::StepPlan& plan, size_t first, size_t count, proto::StepResult& result) override;

 private:
  CudaTokenSampler(const CudaModel& model, kernels::cuda::CudaStream& stream, kernels::cuda::CudaProduct& product,
                   int rows)
      : TokenSampler(model.model(), model.device(), stream, rows),
        on_device_(model),
        cuda_stream_(stream),
        product_(product) {}

  // One step under way.
  struct Draws {
    std::unique_ptr<kernels::cuda::CudaSampler> sampler;
    kernels::cuda::CudaEvent done;
    std::vector<LogitsRow> rows;
    bool begun = false;
  };

  // What the launches of a step's draws depend on: all that they are given.
  struct DrawRecord {
    CudaTokenSampler* sampler = nullptr;
    Draws* draws = nullptr;
    const float* residual = nullptr;
    uint64_t count = 0, rows = 0;           // of the step; which they are, as a hash
    std::array<uint64_t, 4> launches = {};  // CudaSampler::Launches
  };
  absl::Status StartDraws(kernels::cuda::CudaStream& stream, const DrawRecord& record);

  absl::StatusOr<bool> UploadDraws(const proto::StepPlan& plan, Draws& draws);
  kernels::cuda::GemmCall HeadCall(size_t count) const;
  absl::Status NormRows(const float* residual, size_t first, size_t count);
  // Whether the host has to see the row's logits.
  bool IsForHost(const proto::StepPlan& plan, const LogitsRow& row) const;
  absl::Status Draw(const proto::StepPlan& plan, size_t first, size_t count, const proto::StepResult& result);
  absl::Status Fetch(size_t count);

  const CudaModel& on_device_;
  kernels::cuda::CudaStream& cuda_stream_;
  kernels::cuda::CudaProduct& product_;
  std::unique_ptr<kernels::Buffer> normed_, device_logits_;
  std::unique_ptr<kernels::Buffer> device_states_;  // f32; from the first step that pools on
  std::vector<Draws> draws_;                        // by micro-batch; the last one's sampler is that of chunks
  std::vector<kernels::SamplingParams> params_;
  std::vector<kernels::cuda::CudaSampler::Row> drawn_;
  std::vector<bool> for_host_;  // by row of the chunk
};

}  // namespace dovetail::compute
