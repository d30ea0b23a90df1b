#include "compute_worker/cuda/cuda_batch.h"

#include <utility>

#include "base/check.h"
#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/cuda/cuda_hybrid.h"

namespace dovetail::compute {

using kernels::cuda::StepWork;

namespace {

// What a step's records do not say.
struct StepShape {
  const CudaLane* lane = nullptr;
  int64_t rows = 0;
  const void* arriving = nullptr;
  std::array<uint64_t, 3> seam = {};
};

std::byte* DataOf(const CudaBatch::BufferPtr& buffer) { return buffer != nullptr ? buffer->data() : nullptr; }

}  // namespace

CudaLane::CudaLane() = default;
CudaLane::~CudaLane() = default;

absl::Status CudaBatch::BeginWork() {
  DT_RETURN_IF_ERROR(work->Begin(stream()));
  return rows > kMostGraphRows ? work->BeImmediate(stream()) : absl::OkStatus();
}

absl::Status CudaBatch::EnqueueRecords(std::span<const uint64_t> key, const void* arriving, StepWork::Enqueue enqueue) {
  if (work == nullptr) return enqueue(stream());
  std::vector<uint64_t> what;
  what.reserve(sizeof(StepShape) / sizeof(uint64_t) + key.size());
  kernels::cuda::AppendWords(StepShape{lane, rows, arriving, crossing->Words(*this)}, what);
  what.insert(what.end(), key.begin(), key.end());
  return work->Add(stream(), what, std::move(enqueue));
}

void CudaBatch::NameTensors() {
  const auto name = [this](Tensor tensor, const BufferPtr& buffer) {
    tensors[static_cast<size_t>(tensor)] = DataOf(buffer);
  };
  name(Tensor::kX, x);
  name(Tensor::kParts, parts);
  name(Tensor::kQuery, query);
  name(Tensor::kKeyValue, key_value);
  name(Tensor::kH, lane->h);
  name(Tensor::kQkv, lane->qkv);
  name(Tensor::kGateUp, lane->gate_up);
  name(Tensor::kAct, lane->act);
  name(Tensor::kAside, lane->aside);
}

const std::byte* CudaBatch::At(const Place& place) const {
  if (place.tensor == Tensor::kArrived) return static_cast<const std::byte*>(arrived);
  return MutableAt(place);
}

std::byte* CudaBatch::MutableAt(const Place& place) const {
  DT_CHECK(place.tensor != Tensor::kArrived, "o of attention is only read");
  std::byte* const tensor = tensors[static_cast<size_t>(place.tensor)];
  return tensor != nullptr ? tensor + ByteOf(place, rows) : nullptr;
}

}  // namespace dovetail::compute
