#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "server/http/cors.h"
#include "server/http/generation.h"
#include "server/http/key_ring.h"
#include "server/http/options.h"
#include "server/http/routes.h"
#include "server/http/unknown_fields.h"
#include "server/metrics/throughput_log.h"
#include "server/work/intake.h"

namespace dovetail::server {

// The routes: which keys may use them, what they do, and on which thread. Parsing, templates and tokenising run on the
// work queue; everything else is short and runs on the I/O thread.
// Threads: thread-safe.
class ApiHandler : public HttpHandler {
 public:
  ApiHandler(const HttpServerOptions& options, std::shared_ptr<Intake> intake);

  // Before requests come. One inbox for each I/O thread.
  void SetInboxes(std::vector<std::shared_ptr<UpdateInbox>> inboxes) { inboxes_ = std::move(inboxes); }
  void SetBackend(std::shared_ptr<const Backend> backend);  // until then: loading
  void SetDraining() { draining_ = true; }
  bool draining() const { return draining_; }
  void SetHttpStats(std::function<HttpStats()> stats) { http_stats_ = std::move(stats); }

  // Takes over the engine's numbers for /metrics; called at least every few seconds.
  void CollectMetrics();
  void StopWork() { intake_->Stop(); }  // after it no task here runs

  std::vector<std::pair<std::string, std::string>> CommonHeaders(const RequestHead& head) override {
    return cors_.HeadersFor(head);
  }
  std::optional<HttpResponse> OnHead(const RequestHead& head, const std::string& request_id) override;
  void OnRequest(std::shared_ptr<Exchange> exchange) override;
  bool IsProbe(const RequestHead& head) const override;
  HttpResponse ProtocolError(int status, const std::string& message, std::string_view path,
                             const std::string& request_id) override;

 private:
  std::shared_ptr<const Backend> backend() const;
  std::optional<HttpResponse> Refusal(const RequestHead& head, const RouteMatch& match) const;
  std::optional<HttpResponse> RefuseBusy(RouteId route, const std::string& tenant) const;
  HttpResponse Busy(const Backend& backend, const absl::Status& why) const;
  void Get(const Route& route, std::string_view rest, Exchange& exchange);
  std::string TenantOf(const Route& route, const Exchange& exchange) const;
  void CountAnswer(const Exchange& exchange, const Route& route, int status) const;
  void CountRefusal(const std::string& route, const std::string& method, int status,
                    const std::string& request_id) const;
  void Answer(Exchange& exchange, const Route& route, HttpResponse response);
  // What is left of a request when the worker is done with it: runs on the I/O thread, if the client is still there.
  using Continuation = std::function<void()>;
  // Empty: what is left waits in another queue.
  using Work = std::function<Continuation(const std::shared_ptr<CancelToken>&)>;
  static WorkTask TaskOf(const std::string& tenant, const std::shared_ptr<Exchange>& exchange,
                         const std::shared_ptr<CancelToken>& cancel, Work work);
  void OnWorker(const Route& route, const std::string& tenant, const std::shared_ptr<Exchange>& exchange, Work work);
  absl::StatusOr<ParsedGeneration> ParseGeneration(const Route& route, const std::string& body, const Backend& backend,
                                                   const RequestContext& context) const;
  void Generate(const Route& route, const std::shared_ptr<Exchange>& exchange);
  Continuation Begin(const Route& route, const std::shared_ptr<Exchange>& exchange,
                     const std::shared_ptr<const Backend>& backend, absl::StatusOr<PreparedGeneration> request,
                     const GenerationContext& about);
  void Tokenize(const Route& route, std::shared_ptr<Exchange> exchange);
  HttpResponse Health(const Backend* backend) const;
  HttpResponse Ready(const Backend* backend) const;
  static HttpResponse Slots(const Backend& backend, const std::string& query);

  const HttpServerOptions& options_;
  const KeyRing keys_;
  const Cors cors_;
  const std::shared_ptr<Intake> intake_;
  std::vector<std::shared_ptr<UpdateInbox>> inboxes_;
  std::function<HttpStats()> http_stats_;
  ThroughputLog throughput_;
  std::atomic<bool> draining_{false};
  mutable UnknownFields unknown_fields_;
  mutable Mutex mutex_;
  std::shared_ptr<const Backend> backend_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
