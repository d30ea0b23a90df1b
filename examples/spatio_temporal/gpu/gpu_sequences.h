#pragma once
#include <memory>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::spatio_temporal {

// Sequences whose every token attends to all of its sequence, and where their rows lie: that of token r of sequence i
// is row i * length + r or, by token, row r * count + i.
struct SequenceShape {
  int64_t count = 0;
  int64_t length = 0;
  bool by_token = false;
  int heads = 0;
  int head_dim = 0;     // not padded
  bool padded = false;  // whether heads of q, k and v are, in the rows that Attend reads; o's are
};

// Attention of such sequences by the kernels for paged K and V (cuda_attention.h), planned once. Those are causal: they
// hide what lies behind a query's position. Queries that stand at the sequence's last token or behind it see all of it.
// Ownership: the device outlives it.
// Threads: one stream at a time; calls share memory.
class GpuSequences {
 public:
  // Blocks until the plan is on the device. kResourceExhausted: no memory. kInvalidArgument: more sequences than a plan
  // takes.
  static absl::StatusOr<std::unique_ptr<GpuSequences>> Create(kernels::cuda::CudaDevice& device,
                                                              const SequenceShape& shape);

  // o [rows][heads][padded] of query_key_value [rows][3][heads][padded, or head_dim]. Enqueues and returns.
  absl::Status Attend(kernels::cuda::CudaStream& stream, const BF16* query_key_value, BF16* o);

 private:
  GpuSequences(kernels::cuda::CudaDevice& device, const SequenceShape& shape);
  absl::Status Plan(kernels::cuda::CudaStream& stream);

  const SequenceShape shape_;
  const int padded_;
  int64_t block_bytes_ = 0;
  kernels::cuda::CudaAttentionShape attention_shape_;
  kernels::cuda::CudaAttention attention_;
  std::unique_ptr<kernels::Buffer> blocks_, table_, q_;  // q_ where rows are not padded
};

}  // namespace dovetail::spatio_temporal
