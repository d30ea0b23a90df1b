#pragma once
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "proto/control/vllm_engine.pb.h"

namespace dovetail::server {

using KvEventBatchPtr = std::shared_ptr<const vllm::grpc::engine::KvEventBatch>;

// Makes the batches that come first, one at a time, as they are written; null: there are no more. Called on threads of
// gRPC's.
using KvSnapshotFn = std::function<KvEventBatchPtr()>;

// One SubscribeKvEvents call: sends batches in order until the client leaves, the server stops, or the client has left
// kMaxUnread batches, or kMaxUnreadBytes, unread. That one ends with RESOURCE_EXHAUSTED, which says how to go on.
// Threads: thread-safe.
class KvEventsCall final : public grpc::ServerWriteReactor<vllm::grpc::engine::KvEventBatch> {
 public:
  static constexpr size_t kMaxUnread = 4096;  // batches
  static constexpr size_t kMaxUnreadBytes = size_t{32} << 20;

  // `on_end` is told how the call ended, once, on a thread of gRPC's.
  explicit KvEventsCall(std::function<void(const grpc::Status&)> on_end) : on_end_(std::move(on_end)) {}

  // Keeps the call until it is over.
  void KeepUntilDone(std::shared_ptr<KvEventsCall> self) { self_ = std::move(self); }

  // Sends the headers at once, so that the client knows that it hears, and then what `first` makes. Empty: nothing.
  void Begin(KvSnapshotFn first);
  // Nothing happens once the call has ended.
  void Send(KvEventBatchPtr batch);
  void End(const grpc::Status& status);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void WriteNextIfAny() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<void(const grpc::Status&)> on_end_;
  std::shared_ptr<KvEventsCall> self_;
  Mutex mutex_;
  KvSnapshotFn first_ ABSL_GUARDED_BY(mutex_);
  KvEventBatchPtr written_ ABSL_GUARDED_BY(mutex_);  // null: nothing is on its way
  std::deque<KvEventBatchPtr> unread_ ABSL_GUARDED_BY(mutex_);
  size_t unread_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
