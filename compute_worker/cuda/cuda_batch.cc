#include "compute_worker/cuda/cuda_batch.h"

#include <utility>

#include "compute_worker/cuda/cuda_crossing.h"

namespace dovetail::compute {

using kernels::cuda::StepWork;

absl::Status CudaBatch::BeginWork() {
  DT_RETURN_IF_ERROR(work->Begin(stream()));
  return rows > kMostGraphRows ? work->BeImmediate(stream()) : absl::OkStatus();
}

absl::Status CudaBatch::Enqueue(std::array<uint64_t, 2> what, StepWork::Enqueue enqueue) {
  if (work == nullptr) return enqueue(stream());
  const std::array<uint64_t, 3> seam = crossing->Words(*this);
  return work->Add(stream(),
                   {StepWork::Word(lane), static_cast<uint64_t>(rows), what[0], what[1], seam[0], seam[1], seam[2]},
                   std::move(enqueue));
}

}  // namespace dovetail::compute
