#pragma once
#include <cstddef>
#include <memory>

#include "base/ids.h"
#include "base/status.h"
#include "kernels/cuda/exchange/exchange_args.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// How kernels of one micro-batch's decodes hand q, k and v to the host and fetch o from there: they store into pinned
// memory, followed by a number (kernels/cuda/exchange/exchange_args.h) that the host looks at, and read o out of pinned
// memory. No copy is enqueued, and the host does not synchronise. What of the numbers' protocol waits on a GPU is not
// used: the host enqueues what reads o once it has o.
//
// Threads: reactor-owned.
class HostStores {
 public:
  static constexpr int64_t kMostRows = 256;  // of a step

  // Null for a model whose rows of o are no multiple of 16 bytes. kResourceExhausted: no memory. `device` outlives it.
  static absl::StatusOr<std::unique_ptr<HostStores>> Create(const proto::AttentionTable& table,
                                                            kernels::cuda::CudaDevice& device);

  // Before the first kernel of a step, in its stream. Nothing of the step before is under way.
  absl::Status Begin(kernels::cuda::CudaStream& stream, StepId step);
  // What the kernel that stores the op's q, k and v is to tell.
  kernels::cuda::ExchangeEnd end() const;
  // They are there. Acquires what was stored.
  bool Arrived(int op) const;
  // Enqueues what reads o of `rows` rows, row_bytes each (a multiple of 16): it is copied here first, so `o` may go.
  absl::Status Fetch(kernels::cuda::CudaStream& stream, const std::byte* o, int64_t rows, int64_t row_bytes, void* to);

 private:
  HostStores() = default;
  kernels::cuda::ExchangeWords* told() const {
    return reinterpret_cast<kernels::cuda::ExchangeWords*>(pinned_->data());
  }
  absl::Status WriteTables(kernels::cuda::CudaDevice& device);

  std::unique_ptr<kernels::Buffer> own_;      // ExchangeWords of the kernels
  std::unique_ptr<kernels::Buffer> tables_;   // what the gathering kernel reads: an ExchangeFan, rows in their order
  std::unique_ptr<kernels::Buffer> pinned_;   // words that kernels store into, then those that begin a step
  std::unique_ptr<kernels::Buffer> answers_;  // pinned: o
  uint64_t step_ = 0;                         // its number in the words
};

}  // namespace dovetail::compute
