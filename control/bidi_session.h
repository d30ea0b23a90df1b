#pragma once
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"

namespace dovetail::control {

// What may wait for a peer that reads slowly, besides the message that is being written.
struct QueueLimits {
  size_t messages = 0;
  size_t bytes = 0;  // of memory; one message alone may be larger
};

// The server's end of one bidirectional stream. Messages go out in the order of Send(); what waits for a slow peer is
// within `limits`, and one message more ends the stream. Keeps itself alive until gRPC is done with it.
// Threads: thread-safe.
template <typename In, typename Out>
class BidiSession final : public grpc::ServerBidiReactor<In, Out> {
 public:
  struct Handlers {
    std::function<void(const In&)> on_message;  // on a gRPC thread, one at a time
    std::function<void()> on_closed;            // once; nothing follows
  };

  // For a service method, which returns the raw pointer.
  static std::shared_ptr<BidiSession> Start(grpc::CallbackServerContext* context, QueueLimits limits) {
    std::shared_ptr<BidiSession> session(new BidiSession(context, limits));
    session->self_ = session;
    return session;
  }
  // Before messages are handled. Not called in Start(), so that handlers can hold the session.
  void Begin(Handlers handlers) {
    handlers_ = std::move(handlers);
    this->StartRead(&incoming_);
  }

  void Send(Out message) {
    const size_t bytes = message.SpaceUsedLong();
    MutexLock lock(mutex_);
    if (closing_) return;
    const bool too_many = queue_.size() >= limits_.messages;
    if (too_many || (!queue_.empty() && queued_bytes_ + bytes > limits_.bytes)) {
      CloseLocked(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the peer does not read what it is sent"));
      LogWarning("control plane: ", context_->peer(), " does not read what it is sent, and is dropped: ", queue_.size(),
                 " messages of ", queued_bytes_, " bytes wait, and one more has ", bytes, " bytes");
      Clear();
      if (writing_) return context_->TryCancel();  // OnWriteDone finishes
      this->Finish(*std::exchange(final_, nullptr));
      return;
    }
    queue_.push_back({std::move(message), bytes});
    queued_bytes_ += bytes;
    if (!writing_) WriteNext();
  }

  // Of the messages that wait.
  size_t QueuedBytes() const {
    MutexLock lock(mutex_);
    return queued_bytes_;
  }

  // Ends the stream once what was sent is written.
  void Close(grpc::Status status) {
    MutexLock lock(mutex_);
    if (closing_) return;
    CloseLocked(std::move(status));
    if (!writing_) this->Finish(*std::exchange(final_, nullptr));
  }

 private:
  struct Queued {
    Out message;
    size_t bytes = 0;
  };

  BidiSession(grpc::CallbackServerContext* context, QueueLimits limits) : context_(context), limits_(limits) {}

  void CloseLocked(grpc::Status status) {
    closing_ = true;
    final_ = std::make_unique<grpc::Status>(std::move(status));
  }
  void Clear() {  // mutex_ held
    queue_.clear();
    queued_bytes_ = 0;
  }
  void WriteNext() {  // mutex_ held, queue_ not empty
    outgoing_ = std::move(queue_.front().message);
    queued_bytes_ -= queue_.front().bytes;
    queue_.pop_front();
    writing_ = true;
    this->StartWrite(&outgoing_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Close(grpc::Status::OK);
    handlers_.on_message(incoming_);
    this->StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ok) {
      Clear();
      if (!closing_) CloseLocked(grpc::Status(grpc::StatusCode::CANCELLED, "the peer is gone"));
    }
    if (!queue_.empty()) return WriteNext();
    if (closing_ && final_ != nullptr) this->Finish(*std::exchange(final_, nullptr));
  }
  void OnCancel() override { Close(grpc::Status(grpc::StatusCode::CANCELLED, "the peer is gone")); }
  void OnDone() override {
    handlers_.on_closed();
    handlers_ = {};
    self_.reset();  // may destroy this
  }

  grpc::CallbackServerContext* const context_;  // valid until OnDone
  const QueueLimits limits_;
  Handlers handlers_;
  In incoming_;
  Out outgoing_;
  mutable Mutex mutex_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of queue_
  std::unique_ptr<grpc::Status> final_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<BidiSession> self_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::control
