#include "server/grpc/tokenizer_call.h"

#include <algorithm>
#include <utility>

namespace dovetail::server {

TokenizerCall::TokenizerCall(std::shared_ptr<const TokenizerArchive> archive, const grpc::Status& why,
                             std::function<void(const grpc::Status&)> on_end)
    : archive_(std::move(archive)), on_end_(std::move(on_end)), end_(why) {
  if (archive_ == nullptr)
    Finish(end_);
  else
    WriteNext();
}

void TokenizerCall::WriteNext() {
  const size_t size = std::min(kPieceBytes, archive_->zip.size() - at_);
  piece_.set_data(archive_->zip.data() + at_, size);
  at_ += size;
  const bool last = at_ == archive_->zip.size();
  if (last) piece_.set_sha256(archive_->sha256);
  StartWrite(&piece_);
}

void TokenizerCall::OnWriteDone(bool ok) {
  if (ok && at_ < archive_->zip.size()) return WriteNext();
  if (!ok) end_ = grpc::Status(grpc::StatusCode::CANCELLED, "the client left");
  Finish(end_);
}

void TokenizerCall::OnDone() {
  on_end_(end_);
  delete this;
}

}  // namespace dovetail::server
