#pragma once
#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/engine_call.h"
#include "server/grpc/generate_response.h"
#include "server/metrics/request_account.h"

namespace dovetail::server {

// One Generate call: it waits in the queue until its request is read, then it runs. Kept alive by gRPC until OnDone, by
// its task and by the engine until the request's end.
// Threads: thread-safe.
class GenerateCall final : public grpc::ServerWriteReactor<vllm::grpc::engine::GenerateResponse>,
                           public engine::GenerationSink,
                           public EngineCall,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  // `on_end` is called once, before the client is told of the end; it must not call this object.
  GenerateCall(const Server& server, const CallInfo& call, std::function<void()> on_end)
      : server_(server), on_end_(std::move(on_end)), account_(server.metrics, call) {}

  void KeepUntilDone(std::shared_ptr<GenerateCall> self) { self_ = std::move(self); }
  void LimitTime(absl::Duration limit) override;
  void Refuse(const absl::Status& status) override;
  void Begin(const ServedModel& model, PreparedGeneration prepared) override;
  void Cancel() override;

  void OnUpdate(requests::GenerationUpdate update) override;  // on the engine's thread
  void OnWriteDone(bool ok) override;
  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  void TimeOut(absl::Duration limit);
  void LeaveAdmission() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HaveBegun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Ask(void (engine::Engine::*call)(RequestId)) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelInEngine() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopInEngine(int choice) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PauseIfSlow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);     // what is queued is dropped
  void Settle(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // in the metrics and the log, once
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);                              // no write is in flight

  const Server server_;
  const std::function<void()> on_end_;
  Mutex mutex_;
  RequestAccount account_ ABSL_GUARDED_BY(mutex_);
  std::optional<GenerateResponseBuilder> builder_ ABSL_GUARDED_BY(mutex_);
  std::optional<RequestId> id_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_tokens_ ABSL_GUARDED_BY(mutex_) = 0;    // counted in the server's
  std::vector<int> early_stops_ ABSL_GUARDED_BY(mutex_);  // choices whose stop string completed before id_ was known
  std::deque<vllm::grpc::engine::GenerateResponse> queue_ ABSL_GUARDED_BY(mutex_);
  vllm::grpc::engine::GenerateResponse current_ ABSL_GUARDED_BY(mutex_);  // gRPC's while a write is in flight
  std::optional<grpc::Status> last_ ABSL_GUARDED_BY(mutex_);
  bool settled_ ABSL_GUARDED_BY(mutex_) = false;
  bool admitted_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool engine_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;                 // for gRPC: nothing of server_ is used any more
  bool cancelled_in_engine_ ABSL_GUARDED_BY(mutex_) = false;  // the engine was asked to, once
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<GenerateCall> self_;  // set before gRPC knows the call, reset by gRPC's last
  grpc::Alarm time_limit_;
};

}  // namespace dovetail::server
