#pragma once
#include <array>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "base/ids.h"
#include "compute_worker/cuda/cuda_token_sampler.h"
#include "compute_worker/cuda/launch_records.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "kernels/cuda/runtime/step_work.h"

namespace dovetail::compute {

class CudaCrossing;
class CudaHybrid;

// What pieces that run one after the other share on a GPU: a stream and scratch.
// Threads: thread-compatible.
struct CudaLane {
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  CudaLane();
  ~CudaLane();
  kernels::cuda::CudaStream* stream = nullptr;
  std::unique_ptr<kernels::cuda::CudaStream> own_stream;  // unless it is the workers'
  BufferPtr h, qkv, attended, gate_up, act, aside;        // scratch of a piece
  std::unique_ptr<CudaTokenSampler> sampler;
  std::unique_ptr<CudaHybrid> hybrid;  // null for a dense model
};

// A micro-batch of a compute worker on a GPU, and the step that it runs.
// Errors: kInternal: the device is lost.
// Threads: thread-compatible.
struct CudaBatch {
  static constexpr int64_t kMostGraphRows = 256;
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct RopeAngles {
    BufferPtr cos, sin;  // [rows, pairs]
    int pairs = 0;
  };
  kernels::cuda::CudaStream& stream() const { return *lane->stream; }
  // Begins the step's work. A step of many rows is immediate: launches do not bound it.
  absl::Status BeginWork();
  // Adds the launches of records to the step's work; enqueues them at once where it has none. `key`: the records'
  // words (launch_list.h); with the batch's lane and rows, what the way across the seam says of the step, and
  // `arriving` (CudaCrossing::Arrive), they tell all that the launches depend on.
  absl::Status EnqueueRecords(std::span<const uint64_t> key, const void* arriving,
                              kernels::cuda::StepWork::Enqueue enqueue);
  // Likewise one launch that `record` is all about.
  template <kernels::cuda::PlainRecord Record>
  absl::Status Enqueue(const Record& record,
                       std::type_identity_t<absl::Status (*)(kernels::cuda::CudaStream&, const Record&)> run) {
    return work == nullptr ? run(stream(), record) : work->Add(stream(), record, run);
  }

  // Where records' memory lies in this step; null for Tensor::kNone. The second not for kArrived, which others own.
  const std::byte* At(const Place& place) const;
  std::byte* MutableAt(const Place& place) const;
  // Names the batch's tensors and its lane's.
  void NameTensors();

  MicroBatchId id;
  int64_t rows = 0;
  BufferPtr x;                     // [rows, hidden] f32
  BufferPtr parts;                 // of what is added to x next: [CudaProduct::kMostParts, rows, hidden] f32
  BufferPtr parts_of_many;         // the same of more than CudaProduct::kMostPartRows rows, once a step has so many
  BufferPtr query, key_value;      // [rows, query heads * key_dim]; [rows, KV heads * key_dim], then v likewise
  std::vector<RopeAngles> angles;  // by rope of the config
  std::unique_ptr<kernels::cuda::StagedUpload> upload;  // ids, positions, and what the way across adds

  // Of the step.
  CudaLane* lane = nullptr;
  CudaCrossing* crossing = nullptr;
  bool ranks_reach = false;                       // device memory that is given to other ranks (CudaRankRows)
  kernels::cuda::StepWork* work = nullptr;        // null: launches are enqueued as they come
  std::array<std::byte*, kTensors> tensors = {};  // by Tensor
  const void* arrived = nullptr;                  // Tensor::kArrived
};

}  // namespace dovetail::compute
