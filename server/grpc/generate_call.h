#pragma once
#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

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
      : server_(server), account_(server.metrics, call), on_end_(std::move(on_end)) {}

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
  // mutex_ held, as for all below.
  void TimeOut(absl::Duration limit);  // without mutex_
  void LeaveAdmission();
  void HaveBegun();
  void Ask(void (engine::Engine::*call)(RequestId));
  void CancelInEngine();
  void StopInEngine(int choice);
  void PauseIfSlow();
  void End(const grpc::Status& status);     // what is queued is dropped
  void Settle(const grpc::Status& status);  // in the metrics and the log, once
  void Pump();                              // no write is in flight

  const Server server_;
  RequestAccount account_;
  const std::function<void()> on_end_;
  std::mutex mutex_;
  std::optional<GenerateResponseBuilder> builder_;
  std::optional<RequestId> id_;
  int64_t waiting_tokens_ = 0;    // counted in the server's
  std::vector<int> early_stops_;  // choices whose stop string completed before id_ was known
  std::deque<vllm::grpc::engine::GenerateResponse> queue_;
  vllm::grpc::engine::GenerateResponse current_;
  std::optional<grpc::Status> last_;
  bool settled_ = false, admitted_ = false, writing_ = false, ended_ = false, engine_done_ = false, paused_ = false;
  std::shared_ptr<GenerateCall> self_;
  grpc::Alarm time_limit_;
};

}  // namespace dovetail::server
