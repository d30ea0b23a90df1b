#pragma once
#include <memory>
#include <vector>

#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/token_sampler.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_sampler.h"

namespace dovetail::compute {

// The end of a step on a GPU: final norm, head and draws there, so that only tokens come back. Rows whose logits
// somebody wants to see, or whose most likely tokens are to be listed, come back whole and are handled on the host.
class CudaTokenSampler final : public TokenSampler {
 public:
  static constexpr int kRowsAtOnce = 256;

  // Takes the memory for chunks of min(kRowsAtOnce, most_rows) rows: kResourceExhausted. All outlive it.
  static absl::StatusOr<std::unique_ptr<CudaTokenSampler>> Create(const CudaModel& model,
                                                                  kernels::cuda::CudaStream& stream,
                                                                  kernels::cuda::CudaGemm& gemm, int most_rows);

 protected:
  absl::Status Reserve(size_t most) override;
  // `residual` is device memory.
  absl::Status ComputeLogits(const proto::StepPlan& plan, const float* residual, size_t first, size_t count,
                             const proto::StepResult& result) override;
  void HandleRows(const proto::StepPlan& plan, size_t first, size_t count, proto::StepResult& result) override;

 private:
  CudaTokenSampler(const CudaModel& model, kernels::cuda::CudaStream& stream, kernels::cuda::CudaGemm& gemm, int rows)
      : TokenSampler(model.model(), model.device(), stream, rows),
        on_device_(model),
        cuda_stream_(stream),
        gemm_(gemm) {}

  absl::Status NormRows(const float* residual, size_t first, size_t count);
  // Whether the host has to see the row's logits.
  bool IsForHost(const proto::StepPlan& plan, const LogitsRow& row) const;
  absl::Status Draw(const proto::StepPlan& plan, size_t first, size_t count, const proto::StepResult& result);
  absl::Status Fetch(size_t count);

  const CudaModel& on_device_;
  kernels::cuda::CudaStream& cuda_stream_;
  kernels::cuda::CudaGemm& gemm_;
  std::unique_ptr<kernels::Buffer> normed_, device_logits_;
  std::unique_ptr<kernels::cuda::CudaSampler> sampler_;
  std::vector<kernels::SamplingParams> params_;
  std::vector<kernels::cuda::CudaSampler::Row> drawn_;
  std::vector<bool> for_host_;  // by row of the chunk
};

}  // namespace dovetail::compute
