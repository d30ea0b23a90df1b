#include "server/grpc/kv_events_call.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::server {

void KvEventsCall::Begin(KvSnapshotFn first) {
  StartSendInitialMetadata();
  const MutexLock lock(mutex_);
  first_ = std::move(first);
  if (written_ == nullptr) WriteNextIfAny();
}

void KvEventsCall::Send(KvEventBatchPtr batch) {
  const MutexLock lock(mutex_);
  if (ended_) return;
  const size_t bytes = batch->ByteSizeLong();
  if (unread_.size() >= kMaxUnread || unread_bytes_ + bytes > kMaxUnreadBytes) {
    return FinishWith(
        grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                     absl::StrCat("this subscriber reads slower than the cache changes: ", unread_.size(),
                                  " batches of ", unread_bytes_,
                                  " bytes wait for it; subscribe again with the start_sequence_number after the last "
                                  "batch that came, or with 0")));
  }
  unread_bytes_ += bytes;
  unread_.push_back(std::move(batch));
  if (written_ == nullptr) WriteNextIfAny();
}

void KvEventsCall::WriteNextIfAny() {
  if (first_ != nullptr) {
    written_ = first_();
    if (written_ == nullptr) first_ = nullptr;
  }
  if (written_ == nullptr && !unread_.empty()) {
    written_ = std::move(unread_.front());
    unread_.pop_front();
    unread_bytes_ -= written_->ByteSizeLong();
  }
  if (written_ != nullptr) StartWrite(written_.get());
}

void KvEventsCall::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  written_ = nullptr;
  if (ended_) return;
  if (!ok) return FinishWith(grpc::Status(grpc::StatusCode::CANCELLED, "the client left"));
  WriteNextIfAny();
}

// A write that is on its way keeps its batch.
void KvEventsCall::FinishWith(const grpc::Status& status) {
  ended_ = true;
  end_ = status;
  first_ = nullptr;
  unread_.clear();
  Finish(status);
}

void KvEventsCall::End(const grpc::Status& status) {
  const MutexLock lock(mutex_);
  if (!ended_) FinishWith(status);
}

void KvEventsCall::OnCancel() { End(grpc::Status(grpc::StatusCode::CANCELLED, "the client left")); }

void KvEventsCall::OnDone() {
  grpc::Status end;
  {
    const MutexLock lock(mutex_);
    end = end_;
  }
  on_end_(end);
  self_.reset();  // deletes this, unless a batch is being handed over at the moment
}

}  // namespace dovetail::server
