#include "kernels/cuda/runtime/staged_upload.h"

namespace dovetail::kernels::cuda {

absl::Status StagedUpload::Grow(Staging& staging, size_t bytes) {
  if (staging.copied.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(staging.copied, device_.CreateEvent());
  }
  if (staging.host != nullptr && staging.host->size_bytes() >= bytes) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(staging.host, device_.AllocatePinned(bytes));
  return absl::OkStatus();
}

absl::Status StagedUpload::Reserve(size_t bytes) {
  for (Staging& staging : staging_) DT_RETURN_IF_ERROR(Grow(staging, bytes));
  if (memory_ != nullptr && memory_->size_bytes() >= bytes) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(memory_, device_.Allocate(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> StagedUpload::Begin(CudaStream& stream, size_t bytes) {
  at_ = (at_ + 1) % static_cast<int>(staging_.size());
  Staging& staging = staging_[at_];
  if (staging.copied.handle() != nullptr) DT_RETURN_IF_ERROR(staging.copied.Synchronize());
  if (staging.host == nullptr || staging.host->size_bytes() < bytes) DT_RETURN_IF_ERROR(Grow(staging, 2 * bytes));
  if (memory_ == nullptr || memory_->size_bytes() < bytes) {
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // what still runs reads the old memory
    DT_ASSIGN_OR_RETURN(memory_, device_.Allocate(2 * bytes));
  }
  bytes_ = bytes;
  return staging.host->data();
}

absl::Status StagedUpload::Send(CudaStream& stream) {
  return stream.Upload(memory_->data(), staging_[at_].host->data(), bytes_, &staging_[at_].copied);
}

}  // namespace dovetail::kernels::cuda
