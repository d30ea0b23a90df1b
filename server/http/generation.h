#pragma once
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "engine/engine.h"
#include "server/http/exchange.h"
#include "server/http/options.h"
#include "server/http/update_inbox.h"
#include "server/metrics/request_account.h"
#include "server/metrics/server_metrics.h"
#include "server/openai/generation_response.h"
#include "server/openai/prepare.h"
#include "server/work/intake.h"

namespace dovetail::server {

// Where requests go. Outlives every Generation, except the sinks that the engine keeps.
// Threads: immutable.
struct Backend {
  std::shared_ptr<const ServedModel> model;
  engine::Engine* engine = nullptr;
  std::shared_ptr<ServerMetrics> metrics;  // of all APIs of this server
};

// What a Generation is told by the route that made it.
struct GenerationContext {
  CallInfo call;
  std::shared_ptr<Intake> intake;
};

// One generation request between its HTTP exchange and the engine: submits, turns updates into frames, pauses the
// engine when the client reads slowly, cancels when it leaves.
// Threads: the exchange's I/O thread only.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(std::shared_ptr<const Backend> backend, const HttpServerOptions& options,
             std::shared_ptr<Exchange> exchange, PreparedGeneration prepared, GenerationContext context);

  // Submits every prompt, or of many that become vectors the first; the client is still there. If the engine takes one
  // and refuses another, nothing runs and the client gets the refusal.
  void Start(const std::shared_ptr<UpdateInbox>& inbox);
  void OnUpdate(int prompt, const requests::GenerationUpdate& update);

 private:
  struct PromptState {
    RequestId id;
    bool submitted = false;
    bool engine_finished = false;
  };

  // The next prompts: all, or of vectors so many that kVectorsAtOnce are in the engine.
  absl::Status SubmitNext();
  void SubmitNextOrFail();
  void Show(const GenerationResponse::Effects& effects);
  void Answer(HttpResponse response);
  void CountAnswer(int status);
  HttpResponse ErrorFor(const absl::Status& status) const;
  void WatchBacklog();
  void OnDrained();
  void OnGone();
  void OnShutdown();
  void OnTimeout();
  void EndWith(const absl::Status& why);
  void CancelInEngine();
  void Finish();  // the response is complete or will never be: settle the accounts and release what is held
  RequestEnd EndOf(int prompt) const;

  const std::shared_ptr<const Backend> backend_;
  const HttpServerOptions& options_;
  std::shared_ptr<Exchange> exchange_;  // null once finished
  std::vector<requests::GenerationRequest> requests_;
  GenerationResponse response_;
  std::vector<PromptState> prompts_;
  size_t submitted_ = 0, engine_finished_ = 0;  // prompts
  std::shared_ptr<UpdateInbox> inbox_;          // null once all were submitted
  const GenerationContext context_;
  RequestAccount account_;
  int answered_ = 0;  // the status; 0: not yet
  bool gone_ = false;
  bool paused_ = false;
  size_t bytes_when_paused_ = 0;
};

}  // namespace dovetail::server
