#pragma once
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>

#include "absl/time/time.h"
#include "base/cancel_token.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/grpc/engine_calls.h"
#include "server/http/request_log.h"
#include "server/metrics/server_metrics.h"
#include "server/openai/prepare.h"
#include "server/work/intake.h"

namespace dovetail::server {

// Prompt tokens of this interface's calls that the engine has taken and not begun: what routers weigh a server by.
using WaitingTokens = std::atomic<int64_t>;

// A call that becomes a request to the engine: it waits in the queue until it is read, then it runs. Exactly one of
// Refuse and Begin is called.
// Threads: thread-safe
class EngineCall {
 public:
  struct Server {  // outlives the call's task, and gRPC's part of the call; not the engine's part
    engine::Engine& engine;
    EngineCalls& calls;
    Intake& intake;
    ServerMetrics& metrics;
    const RequestLogOptions& log;
    WaitingTokens& waiting_tokens;
  };

  virtual ~EngineCall() = default;

  const std::shared_ptr<CancelToken>& cancel() const { return cancel_; }  // of its task

  // It ends with DEADLINE_EXCEEDED so long from now, if it has not ended then. Once.
  virtual void LimitTime(absl::Duration limit) = 0;
  // Overload is kResourceExhausted to the client, and says when to come again.
  virtual void Refuse(const absl::Status& status) = 0;
  virtual void Begin(const ServedModel& model, PreparedGeneration prepared) = 0;
  // Drops its task, or cancels in the engine. Not to be called by a sink.
  virtual void Cancel() = 0;

 private:
  const std::shared_ptr<CancelToken> cancel_ = std::make_shared<CancelToken>();
};

// As the client is told a refusal: an overload says when to come again.
// Threads: thread-safe.
absl::Status ToldRefusal(const absl::Status& status, const EngineCall::Server& server);
// How the engine ended a request that failed.
// Threads: pure.
grpc::Status ErrorOf(const requests::GenerationUpdate& update);
// kDeadlineExceeded to the client.
// Threads: pure.
grpc::Status TimedOut(absl::Duration limit);

}  // namespace dovetail::server
