#pragma once
#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/engine_call.h"
#include "server/metrics/request_account.h"

namespace dovetail::server {

// One Embed call. Kept alive by gRPC until OnDone, by its task and by the engine until the request's end.
// Threads: thread-safe
class EmbedCall final : public grpc::ServerUnaryReactor,
                        public engine::GenerationSink,
                        public EngineCall,
                        public std::enable_shared_from_this<EmbedCall> {
 public:
  // `reply` is gRPC's, until the call has ended. `on_end` is called once, before the client is told of the end; it must
  // not call this object.
  EmbedCall(const Server& server, const CallInfo& call, vllm::grpc::engine::EmbedResponse* reply,
            std::function<void()> on_end)
      : server_(server), on_end_(std::move(on_end)), account_(server.metrics, call), reply_(reply) {}

  void KeepUntilDone(std::shared_ptr<EmbedCall> self) { self_ = std::move(self); }

  void LimitTime(absl::Duration limit) override;
  void Refuse(const absl::Status& status) override;
  void Begin(const ServedModel& model, PreparedGeneration prepared) override;
  void Cancel() override;

  void OnUpdate(requests::GenerationUpdate update) override;  // on the engine's thread
  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  void TimeOut(absl::Duration limit);
  void CancelInEngine() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveAdmission() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HaveBegun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Server server_;
  const std::function<void()> on_end_;
  Mutex mutex_;
  RequestAccount account_ ABSL_GUARDED_BY(mutex_);
  vllm::grpc::engine::EmbedResponse* const reply_ ABSL_PT_GUARDED_BY(mutex_);
  std::optional<RequestId> id_ ABSL_GUARDED_BY(mutex_);
  VectorForm form_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_tokens_ ABSL_GUARDED_BY(mutex_) = 0;  // counted in the server's
  bool admitted_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool engine_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;                 // for gRPC: nothing of server_ is used any more
  bool cancelled_in_engine_ ABSL_GUARDED_BY(mutex_) = false;  // the engine was asked to, once
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Alarm time_limit_;
  std::shared_ptr<EmbedCall> self_;  // set before gRPC knows the call, reset by gRPC's last
};

}  // namespace dovetail::server
