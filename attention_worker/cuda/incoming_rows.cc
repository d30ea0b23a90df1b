#include "attention_worker/cuda/incoming_rows.h"

#include <cstring>

namespace dovetail::attention {

absl::Status IncomingRows::Send(kernels::cuda::CudaStream& stream, std::byte* to, std::span<const std::byte> rows) {
  Rows& slot = rows_[(oldest_ + under_way_) % rows_.size()];
  if (under_way_ == rows_.size()) DT_RETURN_IF_ERROR(slot.done.Synchronize());
  if (slot.done.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(slot.done, device_.CreateEvent());
  }
  if (slot.pinned == nullptr || slot.pinned->size_bytes() < rows.size()) {
    slot.pinned.reset();
    DT_ASSIGN_OR_RETURN(slot.pinned, device_.AllocatePinned(rows.size() + rows.size() / 4));
  }
  std::memcpy(slot.pinned->data(), rows.data(), rows.size());
  return stream.Copy(to, slot.pinned->data(), rows.size());
}

absl::Status IncomingRows::End(kernels::cuda::CudaStream& stream) {
  DT_RETURN_IF_ERROR(stream.Record(rows_[(oldest_ + under_way_) % rows_.size()].done));
  if (under_way_ == rows_.size()) {
    oldest_ = (oldest_ + 1) % rows_.size();
  } else {
    ++under_way_;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> IncomingRows::TakeOldest() {
  if (under_way_ == 0) return true;
  DT_ASSIGN_OR_RETURN(const bool done, rows_[oldest_].done.Done());
  if (!done) return false;
  oldest_ = (oldest_ + 1) % rows_.size();
  --under_way_;
  return true;
}

}  // namespace dovetail::attention
