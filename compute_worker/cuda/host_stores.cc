#include "compute_worker/cuda/host_stores.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::compute {

using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeEnd;
using kernels::cuda::ExchangeFan;
using kernels::cuda::ExchangeRow;
using kernels::cuda::ExchangeWords;

namespace {

constexpr int64_t kVector = 16;  // bytes that the gathering kernel reads at once
constexpr size_t kBeginAt = offsetof(ExchangeWords, step);
constexpr uint64_t kDeadlineNs = 1'000'000'000;  // of waits that there are none of

}  // namespace

absl::StatusOr<std::unique_ptr<HostStores>> HostStores::Create(const proto::AttentionTable& table,
                                                               kernels::cuda::CudaDevice& device) {
  int64_t most_bytes = 0;
  for (const proto::SoftmaxSpec& spec : table.views) {
    const int64_t row_bytes = int64_t{spec.query_heads} * spec.value_dim * kElement;
    if (row_bytes % kVector != 0) return nullptr;
    most_bytes = std::max(most_bytes, row_bytes);
  }
  std::unique_ptr<HostStores> made(new HostStores());
  DT_ASSIGN_OR_RETURN(made->own_, device.Allocate(sizeof(ExchangeWords)));
  DT_ASSIGN_OR_RETURN(made->tables_, device.Allocate(sizeof(ExchangeFan) + kMostRows * sizeof(ExchangeRow)));
  DT_ASSIGN_OR_RETURN(made->pinned_, device.AllocatePinned(2 * sizeof(ExchangeWords)));
  DT_ASSIGN_OR_RETURN(made->answers_, device.AllocatePinned(kMostRows * most_bytes));
  DT_RETURN_IF_ERROR(made->WriteTables(device));
  return made;
}

absl::Status HostStores::WriteTables(kernels::cuda::CudaDevice& device) {
  ExchangeFan fan;
  fan.count = 1;
  fan.peers[0].end = end();
  fan.peers[0].answer = answers_->data();
  std::vector<ExchangeRow> rows(kMostRows);
  for (int i = 0; i < kMostRows; ++i) rows[i] = {0, i};
  DT_ASSIGN_OR_RETURN(const auto stream, device.CreateCudaStream());
  DT_RETURN_IF_ERROR(stream->Fill(own_->data(), 0, sizeof(ExchangeWords)));
  DT_RETURN_IF_ERROR(stream->Copy(tables_->data(), &fan, sizeof(fan)));
  DT_RETURN_IF_ERROR(stream->Copy(tables_->data() + sizeof(fan), rows.data(), rows.size() * sizeof(ExchangeRow)));
  return stream->SynchronizeStatus();
}

ExchangeEnd HostStores::end() const { return {reinterpret_cast<ExchangeWords*>(own_->data()), told(), kDeadlineNs}; }

absl::Status HostStores::Begin(CudaStream& stream, StepId step) {
  step_ = step.value() * kernels::cuda::kExchangeOps;
  // Steps may be counted anew, and pinned memory may have served before.
  std::atomic_ref<uint64_t>(told()->arrived).store(0, std::memory_order_relaxed);
  ExchangeWords& begin = *(told() + 1);
  begin = ExchangeWords();
  begin.step = step_;
  return stream.Copy(own_->data() + kBeginAt, reinterpret_cast<const std::byte*>(&begin) + kBeginAt,
                     sizeof(ExchangeWords) - kBeginAt);
}

bool HostStores::Arrived(int op) const {
  return std::atomic_ref<uint64_t>(told()->arrived).load(std::memory_order_acquire) >=
         step_ + static_cast<uint64_t>(op) + 1;
}

absl::Status HostStores::Fetch(CudaStream& stream, const std::byte* o, int64_t rows, int64_t row_bytes, void* to) {
  std::memcpy(answers_->data(), o, static_cast<size_t>(rows * row_bytes));
  const auto* const fan = reinterpret_cast<const ExchangeFan*>(tables_->data());
  const auto* const order = reinterpret_cast<const ExchangeRow*>(tables_->data() + sizeof(ExchangeFan));
  return kernels::cuda::ExchangeGather(stream, {fan, order, to, row_bytes, static_cast<int32_t>(rows)});
}

}  // namespace dovetail::compute
