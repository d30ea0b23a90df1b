#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/launch_list.h"
#include "kernels/cuda/experts/expert_product.h"
#include "kernels/cuda/products/cuda_product.h"

namespace dovetail::compute {

// Products of few rows take a multiple of eight: fewer sizes to choose algorithms for. The rows beyond are scratch.
inline constexpr int64_t kProductRowStep = 8;
int64_t PaddedRows(int64_t rows, bool in_order);

// How many rows of one expert a tile has, where experts share so many pairs (row, choice). `groups`: it may have
// kGroupedTileRows. `kept`: weights are in 4 or 8 bits.
int ExpertTileRows(int64_t pairs, int64_t experts, bool groups, bool kept);

// Enqueues launches that are records: names become addresses of the batch's memory and of the model's weights, rows are
// the batch's. One function a record, and none decides anything but what depends on the rows.
// Ownership: `model` and the products outlive it.
// Errors: those of the kernels and of the way across the seam.
// Threads: reactor-owned, as CudaDense.
class LaunchRunner {
 public:
  // `groups`: the device multiplies tiles of kGroupedTileRows (GroupsProducts).
  LaunchRunner(const CudaModel& model, kernels::cuda::CudaProduct& product, kernels::cuda::ExpertProduct& experts,
               bool groups)
      : model_(model), product_(product), experts_(experts), groups_(groups) {}

  // Products of the launches choose their algorithms for as many rows as the batch has; blocks, and computes nothing.
  absl::Status ChooseProducts(std::span<const Launch> launches, CudaBatch& batch) const;

  // In the batch's stream. `parts` and `arriving` as CudaCrossing::Arrive takes them.
  absl::Status Run(std::span<const Launch> launches, const std::vector<WorkerPart>& parts, const void* arriving,
                   CudaBatch& batch) const;

 private:
  kernels::cuda::GemmCall CallOf(const ProductRecord& record, CudaBatch& batch) const;
  absl::Status Start(const ProductRecord& record, CudaBatch& batch) const;
  absl::Status Start(const NormRecord& record, CudaBatch& batch) const;
  absl::Status Start(const CombineRecord& record, CudaBatch& batch) const;
  absl::Status Start(const CopyRecord& record, CudaBatch& batch) const;
  absl::Status Start(const ClearRecord& record, CudaBatch& batch) const;
  absl::Status Start(const GatedActivationRecord& record, CudaBatch& batch) const;
  absl::Status Start(const MlpActivationRecord& record, CudaBatch& batch) const;
  absl::Status Start(const GatedProductRecord& record, CudaBatch& batch) const;
  absl::Status Start(const HeadsRecord& record, CudaBatch& batch) const;
  // launch_runner_hybrid.cc
  absl::Status Start(const StateInputsRecord& record, CudaBatch& batch) const;
  absl::Status Start(const StateGatesRecord& record, CudaBatch& batch) const;
  absl::Status Start(const OutputGateRecord& record, CudaBatch& batch) const;
  absl::Status Start(const JoinKeysRecord& record, CudaBatch& batch) const;
  absl::Status Start(const RouteRecord& record, CudaBatch& batch) const;
  absl::Status Start(const PlaceExpertsRecord& record, CudaBatch& batch) const;
  absl::Status Start(const ExpertProductRecord& record, CudaBatch& batch) const;
  absl::Status Start(const GatedExpertsRecord& record, CudaBatch& batch) const;
  absl::Status Start(const ExpertSumRecord& record, CudaBatch& batch) const;
  absl::Status Start(const SummedExpertsRecord& record, CudaBatch& batch) const;
  absl::Status Start(const GatedAddRecord& record, CudaBatch& batch) const;

  absl::Status Cross(const SeamRecord& record, const std::vector<WorkerPart>& parts, const void* arriving,
                     CudaBatch& batch) const;

  const CudaStep& StepOf(const WeightName& name) const { return model_.steps()[static_cast<size_t>(name.step)]; }
  const float* Vector(const WeightName& name) const;  // null for kNone
  kernels::cuda::GemmType gemm_type() const;
  // Products of the experts of these rows are by pair.
  static bool ByPair(const ExpertProductRecord& record, const Place& expert, const CudaBatch& batch);
  absl::Status StartPairs(const GatedExpertsRecord& record, CudaBatch& batch) const;
  kernels::cuda::ExpertGemmLaunch LaunchOf(const ExpertProductRecord& record, CudaBatch& batch) const;
  absl::Status Multiply(const ExpertProductRecord& record, const kernels::cuda::ExpertGemmLaunch& product,
                        CudaBatch& batch) const;

  const CudaModel& model_;
  kernels::cuda::CudaProduct& product_;
  kernels::cuda::ExpertProduct& experts_;
  const bool groups_;
};

}  // namespace dovetail::compute
