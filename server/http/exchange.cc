#include "server/http/exchange.h"

#include "base/clock.h"
#include "server/http/connection.h"

namespace dovetail::server {

Exchange::Exchange(std::shared_ptr<Connection> connection, RequestHead head, RequestBody body, std::string id)
    : connection_(std::move(connection)),
      head_(std::move(head)),
      body_(std::move(body)),
      id_(std::move(id)),
      arrived_(SystemClock().Now()) {}

int Exchange::io_thread() const { return connection_->io_thread(); }

void Exchange::Respond(const HttpResponse& response) {
  if (gone_ || complete_) return;
  complete_ = true;
  connection_->Respond(this, response);
}

void Exchange::StartStream() {
  if (gone_ || complete_ || streaming_) return;
  streaming_ = true;
  connection_->BeginStream(this);
}

void Exchange::Write(const std::string& frames, int tokens) {
  if (gone_ || complete_ || frames.empty()) return;
  connection_->WriteStream(this, frames, tokens);
}

void Exchange::EndStream() {
  if (gone_ || complete_) return;
  complete_ = true;
  connection_->EndStream(this);
}

void Exchange::KeepAlive(std::chrono::milliseconds quiet, std::string frame) {
  if (!gone_ && !complete_) connection_->KeepAlive(this, quiet, std::move(frame));
}

void Exchange::LimitTime(std::chrono::milliseconds limit) {
  if (!gone_ && !complete_) connection_->LimitTime(this, limit);
}

Exchange::Backlog Exchange::backlog() const { return connection_->backlog(); }

void Exchange::Abort() {
  if (gone_) return;
  const auto keep = shared_from_this();
  connection_->Close();
}

void Exchange::Post(std::function<void()> task) { connection_->Post(std::move(task)); }

void Exchange::Gone() {
  if (gone_) return;
  gone_ = true;
  const auto callback = std::move(on_gone);
  on_gone = on_drained = on_shutdown = on_timeout = nullptr;
  if (!complete_ && callback) callback();
}

}  // namespace dovetail::server
