#pragma once
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace dovetail::control {

// The server's end of one bidirectional stream. Messages go out in the order of Send(); at most `max_queued` wait for a
// slow peer, one more ends the stream. Thread-safe. Keeps itself alive until gRPC is done with it.
template <typename In, typename Out>
class BidiSession final : public grpc::ServerBidiReactor<In, Out> {
 public:
  struct Handlers {
    std::function<void(const In&)> on_message;  // on a gRPC thread, one at a time
    std::function<void()> on_closed;            // once; nothing follows
  };

  // For a service method, which returns the raw pointer.
  static std::shared_ptr<BidiSession> Start(grpc::CallbackServerContext* context, size_t max_queued) {
    std::shared_ptr<BidiSession> session(new BidiSession(context, max_queued));
    session->self_ = session;
    return session;
  }
  // Before messages are handled. Not called in Start(), so that handlers can hold the session.
  void Begin(Handlers handlers) {
    handlers_ = std::move(handlers);
    this->StartRead(&incoming_);
  }

  void Send(Out message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    if (queue_.size() >= max_queued_) {
      CloseLocked(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the peer does not read what it is sent"));
      queue_.clear();
      if (writing_) return context_->TryCancel();  // OnWriteDone finishes
      this->Finish(*std::exchange(final_, nullptr));
      return;
    }
    queue_.push_back(std::move(message));
    if (!writing_) WriteNext();
  }

  // Ends the stream once what was sent is written.
  void Close(grpc::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    CloseLocked(std::move(status));
    if (!writing_) this->Finish(*std::exchange(final_, nullptr));
  }

 private:
  BidiSession(grpc::CallbackServerContext* context, size_t max_queued) : context_(context), max_queued_(max_queued) {}

  void CloseLocked(grpc::Status status) {
    closing_ = true;
    final_ = std::make_unique<grpc::Status>(std::move(status));
  }
  void WriteNext() {  // mutex_ held, queue_ not empty
    outgoing_ = std::move(queue_.front());
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
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    if (!ok) {
      queue_.clear();
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
  const size_t max_queued_;
  Handlers handlers_;
  In incoming_;
  Out outgoing_;
  std::mutex mutex_;
  std::deque<Out> queue_;
  std::unique_ptr<grpc::Status> final_;
  bool writing_ = false;
  bool closing_ = false;
  std::shared_ptr<BidiSession> self_;
};

}  // namespace dovetail::control
