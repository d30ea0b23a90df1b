#include "server/http/api_handler.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/http/openapi.h"
#include "server/http/page.h"
#include "server/http/request_log.h"
#include "server/http/responses.h"
#include "server/openai/llama_server.h"
#include "server/openai/small_responses.h"

namespace dovetail::server {
namespace {

std::optional<std::string_view> TraceparentOf(const RequestHead& head) {
  const std::string* const value = head.Find("traceparent");
  return value == nullptr ? std::nullopt : std::optional<std::string_view>(*value);
}

bool IsJson(const std::string& content_type) {
  const size_t end = std::min(content_type.find(';'), content_type.size());
  std::string type = content_type.substr(0, end);
  while (!type.empty() && (type.back() == ' ' || type.back() == '\t')) type.pop_back();
  return absl::EqualsIgnoreCase(type, "application/json");
}

// A header's value, where it is short and plain enough to be told to the client.
std::string Named(const std::string& value) {
  const bool plain = value.size() <= 64 && std::all_of(value.begin(), value.end(), absl::ascii_isprint);
  return plain ? value : "of this request";
}

std::optional<HttpResponse> RefuseCoding(const RequestHead& head) {
  const auto coded = std::find_if(head.headers.begin(), head.headers.end(), [](const auto& header) {
    const auto& [name, value] = header;
    return name == "content-encoding" && !value.empty() && !absl::EqualsIgnoreCase(value, "identity");
  });
  if (coded == head.headers.end()) return std::nullopt;
  HttpResponse response =
      ErrorResponse(415, "invalid_request_error",
                    "The Content-Encoding " + Named(coded->second) + " is not supported: send the body without one.",
                    "unsupported_content_encoding");
  response.headers.emplace_back("Accept-Encoding", "identity");
  return response;
}

bool Generates(RouteId route) {
  switch (route) {
    case RouteId::kCompletions:
    case RouteId::kChat:
    case RouteId::kResponses:
    case RouteId::kMessages:
    case RouteId::kLlama:
    case RouteId::kInfill:
    case RouteId::kEmbeddings:
    case RouteId::kLlamaEmbeddings: return true;
    default: return false;
  }
}

// Of errors there. Clients of an API ask for paths below its own, also for those that are not here.
AnswerShape ShapeOf(std::string_view path) {
  constexpr std::string_view kMessagesApi = "/v1/messages";
  const bool messages = path.substr(0, kMessagesApi.size()) == kMessagesApi &&
                        (path.size() == kMessagesApi.size() || path[kMessagesApi.size()] == '/');
  return messages ? AnswerShape::kMessages : AnswerShape::kChat;
}

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// What `OPTIONS *` asks for: a sign of life, which says nothing of any path.
HttpResponse ServerOptions() {
  HttpResponse response;
  response.content_type = "text/plain; charset=utf-8";
  response.headers = {{"Allow", "GET, HEAD, POST, OPTIONS"}};
  return response;
}

// What requests may use now: workers come and go.
int64_t UsableLength(const Backend& backend) {
  return backend.model->UsableLength(backend.engine->stats().scheduler.longest_sequence);
}

HttpResponse Loading() {
  return ErrorResponse(503, "unavailable_error", "The model is loading; try again shortly.", "loading");
}
HttpResponse Draining() {
  HttpResponse response =
      ErrorResponse(503, "unavailable_error", "This server is shutting down; ask another replica.", "draining");
  response.close = true;
  return response;
}

}  // namespace

ApiHandler::ApiHandler(const HttpServerOptions& options, std::shared_ptr<Intake> intake)
    : options_(options),
      keys_(options.api_keys, options.metrics_api_keys),
      cors_(options.cors),
      intake_(std::move(intake)) {}

void ApiHandler::SetBackend(std::shared_ptr<const Backend> backend) {
  MutexLock lock(mutex_);
  backend_ = std::move(backend);
}

std::shared_ptr<const Backend> ApiHandler::backend() const {
  MutexLock lock(mutex_);
  return backend_;
}

void ApiHandler::CollectMetrics() {
  const auto backend = this->backend();
  if (backend == nullptr) return;
  const engine::EngineStats engine = backend->engine->stats();
  backend->metrics->Update(engine, backend->engine->TakeStepSamples());
  backend->metrics->UpdateWaiting(engine.scheduler.waiting_requests, intake_->grammars.waiting());
  if (options_.log.stats) throughput_.Look(engine.scheduler, SystemClock().Now());
  if (!http_stats_) return;
  HttpStats stats = http_stats_();
  stats.requests_to_read = intake_->waiting();
  backend->metrics->UpdateHttp(stats);
}

// ---- before the body ----

std::optional<HttpResponse> ApiHandler::OnHead(const RequestHead& head, const std::string& request_id) {
  const RouteMatch match = MatchRoute(head.method, head.path);
  std::optional<HttpResponse> refusal = Refusal(head, match);
  if (!refusal) return refusal;
  ShapeError(ShapeOf(head.path), *refusal);
  CountRefusal(match.route == nullptr ? "none" : std::string(match.route->path), head.method, refusal->status,
               request_id);
  return refusal;
}

std::optional<HttpResponse> ApiHandler::Refusal(const RequestHead& head, const RouteMatch& match) const {
  if (auto preflight = cors_.Preflight(head)) return preflight;
  if (head.path == "*") return ServerOptions();
  const Scope scope = match.route != nullptr ? match.route->scope : Scope::kInference;
  const std::optional<std::string> tenant = keys_.Authorize(head, scope);
  if (!tenant)
    return ErrorResponse(401, "authentication_error",
                         "Missing or incorrect API key: send it as Authorization: Bearer KEY.", "invalid_api_key");
  if (match.route == nullptr && !match.allow.empty()) {
    HttpResponse response =
        ErrorResponse(405, "invalid_request_error", "This path does not take that method.", "method_not_allowed");
    response.headers.emplace_back("Allow", match.allow);
    return response;
  }
  if (const std::string_view why = WhyNotServed(head.path); match.route == nullptr && !why.empty())
    return ErrorResponse(501, "not_supported_error", std::string(why), "not_supported");
  if (match.route == nullptr)
    return ErrorResponse(404, "not_found_error", "There is nothing at this path.", "unknown_url");
  if (match.route->method == "POST") {
    if (std::optional<HttpResponse> refusal = RefuseCoding(head)) return refusal;
    const std::string* type = head.Find("content-type");
    if (type != nullptr && !IsJson(*type))
      return ErrorResponse(415, "invalid_request_error", "The body must be application/json.",
                           "unsupported_media_type");
    return RefuseBusy(match.route->id, *tenant);
  }
  return std::nullopt;
}

// Reading and tokenising a request that cannot run costs time that running ones need.
std::optional<HttpResponse> ApiHandler::RefuseBusy(RouteId route, const std::string& tenant) const {
  if (draining_) return Draining();
  const auto backend = this->backend();
  if (backend == nullptr) return Loading();
  if (!Generates(route)) return std::nullopt;
  const engine::EngineStats stats = backend->engine->stats();
  if (!stats.healthy) return ErrorResponse(ToApiError(absl::UnavailableError("")));
  if (const absl::Status room = intake_->admission.Check(tenant, stats); !room.ok()) return Busy(*backend, room);
  return std::nullopt;
}

HttpResponse ApiHandler::Busy(const Backend& backend, const absl::Status& why) const {
  const int waiting = backend.engine->stats().scheduler.waiting_requests;
  return ErrorResponse(why, options_.overload_status,
                       intake_->admission.RetryAfterSeconds(waiting, SystemClock().Now()));
}

bool ApiHandler::IsProbe(const RequestHead& head) const {
  const Route* const route = MatchRoute(head.method, head.path).route;
  return route != nullptr && (route->id == RouteId::kHealth || route->id == RouteId::kLive ||
                              route->id == RouteId::kReady || route->id == RouteId::kMetrics);
}

HttpResponse ApiHandler::ProtocolError(int status, const std::string& message, std::string_view path,
                                       const std::string& request_id) {
  HttpResponse response = ErrorResponse(status, status == 503 ? "overloaded_error" : "invalid_request_error", message);
  ShapeError(ShapeOf(path), response);
  CountRefusal("none", "", status, request_id);
  return response;
}

// ---- requests ----

void ApiHandler::CountAnswer(const Exchange& exchange, const Route& route, int status) const {
  if (const auto backend = this->backend())
    backend->metrics->HttpResponse(std::string(route.path), exchange.head().method, status);
  const LogLevel level = IsProbe(exchange.head()) ? LogLevel::kDebug : LogLevel::kInfo;
  if (!LogsAt(level)) return;
  LogCallEnd(level, {exchange.id(), TenantOf(route, exchange), std::string(route.path), exchange.arrived()},
             std::to_string(status), SystemClock().Now());
}

// Of a request that was not read whole; what browsers ask before their requests are no news.
void ApiHandler::CountRefusal(const std::string& route, const std::string& method, int status,
                              const std::string& request_id) const {
  if (const auto backend = this->backend()) backend->metrics->HttpResponse(route, method, status);
  const absl::Time now = SystemClock().Now();
  LogCallEnd(status < 400 ? LogLevel::kDebug : LogLevel::kInfo, {request_id, "", route, now}, std::to_string(status),
             now);
}

void ApiHandler::Answer(Exchange& exchange, const Route& route, HttpResponse response) {
  CountAnswer(exchange, route, response.status);
  ShapeError(ShapeOf(route.path), response);
  exchange.Respond(response);
}

void ApiHandler::OnRequest(std::shared_ptr<Exchange> exchange) {
  const RouteMatch match = MatchRoute(exchange->head().method, exchange->head().path);
  if (Generates(match.route->id)) return Generate(*match.route, exchange);
  switch (match.route->id) {
    case RouteId::kApplyTemplate:
    case RouteId::kCountTokens:
    case RouteId::kTokenize:
    case RouteId::kDetokenize: return Tokenize(*match.route, std::move(exchange));
    default: return Get(*match.route, match.rest, *exchange);
  }
}

HttpResponse ApiHandler::Health(const Backend* backend) const {
  if (backend == nullptr) return Loading();
  const engine::EngineStats stats = backend->engine->stats();
  const bool has_work = stats.scheduler.running_sequences > 0 || stats.scheduler.waiting_requests > 0;
  const bool stalled =
      has_work && SystemClock().Now() - stats.last_progress > absl::FromChrono(options_.health_stall_limit);
  if (!stats.healthy || stalled)
    return ErrorResponse(503, "unavailable_error", "The engine makes no progress.", "engine_stalled");
  return JsonResponse(R"({"status":"ok"})");
}

HttpResponse ApiHandler::Ready(const Backend* backend) const {
  if (draining_) return ErrorResponse(503, "unavailable_error", "This server is shutting down.", "draining");
  HttpResponse health = Health(backend);
  if (health.status != 200) return health;
  return JsonResponse(R"({"status":"ready"})");
}

HttpResponse ApiHandler::Slots(const Backend& backend, const std::string& query) {
  const int running = backend.engine->stats().scheduler.running_sequences;
  const bool must_be_free = absl::StrContains(query, "fail_on_no_slot=1");
  if (must_be_free && running >= backend.model->max_num_seqs)
    return ErrorResponse(503, "unavailable_error", "No slot is free.", "no_slot");
  return JsonResponse(SlotsBody(*backend.model, UsableLength(backend), running));
}

void ApiHandler::Get(const Route& route, std::string_view rest, Exchange& exchange) {
  const auto backend = this->backend();
  const auto respond = [&](absl::StatusOr<std::string> body) {
    Answer(exchange, route, body.ok() ? JsonResponse(*std::move(body)) : ErrorResponse(ToApiError(body.status())));
  };
  switch (route.id) {
    case RouteId::kPage:
    case RouteId::kDocs: return Answer(exchange, route, PageResponse());
    case RouteId::kOpenApi: return Answer(exchange, route, JsonResponse(OpenApiText(options_.version)));
    case RouteId::kLive: return Answer(exchange, route, JsonResponse(R"({"status":"alive"})"));
    case RouteId::kReady: return Answer(exchange, route, Ready(backend.get()));
    case RouteId::kHealth: return Answer(exchange, route, Health(backend.get()));
    case RouteId::kVersion: return Answer(exchange, route, JsonResponse(Dump({{"version", options_.version}})));
    default: break;
  }
  if (backend == nullptr) return Answer(exchange, route, Loading());
  switch (route.id) {
    case RouteId::kModels: return respond(ModelsBody(*backend->model, UsableLength(*backend)));
    case RouteId::kModel: return respond(ModelBody(*backend->model, std::string(rest), UsableLength(*backend)));
    case RouteId::kProps: return respond(PropsBody(*backend->model, UsableLength(*backend), options_.version));
    case RouteId::kSlots: return Answer(exchange, route, Slots(*backend, exchange.head().query));
    case RouteId::kTokenizerInfo: return respond(TokenizerInfoBody(*backend->model));
    default: break;
  }
  CollectMetrics();
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = backend->metrics->Text();
  Answer(exchange, route, std::move(response));
}

std::string ApiHandler::TenantOf(const Route& route, const Exchange& exchange) const {
  return keys_.Authorize(exchange.head(), route.scope).value_or(kAnonymousTenant);
}

WorkTask ApiHandler::TaskOf(const std::string& tenant, const std::shared_ptr<Exchange>& exchange,
                            const std::shared_ptr<CancelToken>& cancel, Work work) {
  return {tenant, exchange->body().size(), cancel, [exchange, cancel, work = std::move(work)] {
            Continuation then = work(cancel);
            if (!then) return;
            exchange->Post([exchange, then = std::move(then)] {
              exchange->DropBody();
              if (exchange->gone() || exchange->complete()) return;
              exchange->on_gone = exchange->on_timeout = nullptr;
              then();
            });
          }};
}

// A client that leaves takes its task along; what has begun ends where it next looks.
void ApiHandler::OnWorker(const Route& route, const std::string& tenant, const std::shared_ptr<Exchange>& exchange,
                          Work work) {
  const auto cancel = std::make_shared<CancelToken>();
  const absl::Status posted = intake_->queue.TryPost(TaskOf(tenant, exchange, cancel, std::move(work)));
  if (!posted.ok()) return Answer(*exchange, route, Busy(*backend(), posted));
  exchange->on_gone = [this, &route, cancel, &left = *exchange] {  // it calls this
    intake_->Cancel(*cancel);
    CountAnswer(left, route, 499);
  };
  exchange->on_timeout = [this, &route, cancel, &late = *exchange] {  // it calls this
    late.on_gone = nullptr;
    intake_->Cancel(*cancel);
    Answer(late, route, ErrorResponse(ToApiError(RequestTimedOut(options_.request_timeout))));
  };
}

absl::StatusOr<ParsedGeneration> ApiHandler::ParseGeneration(const Route& route, const std::string& body,
                                                             const Backend& backend,
                                                             const RequestContext& context) const {
  DT_ASSIGN_OR_RETURN(const Json json, ParseJson(body, options_.json));
  DT_RETURN_IF_ERROR(context.CheckWanted());
  unknown_fields_.Note(route, json);
  if (route.id == RouteId::kChat) return ParseChatRequest(json, *backend.model);
  if (route.id == RouteId::kResponses) return ParseResponsesRequest(json, *backend.model);
  if (route.id == RouteId::kMessages) return ParseMessagesRequest(json, *backend.model);
  if (route.id == RouteId::kLlama) return ParseLlamaRequest(json, *backend.model);
  if (route.id == RouteId::kInfill) return ParseInfillRequest(json, *backend.model);
  if (route.id == RouteId::kEmbeddings) return ParseEmbeddingRequest(json, *backend.model);
  if (route.id == RouteId::kLlamaEmbeddings) return ParseLlamaEmbeddingRequest(json, *backend.model);
  return ParseCompletionRequest(json, *backend.model);
}

ApiHandler::Continuation ApiHandler::Begin(const Route& route, const std::shared_ptr<Exchange>& exchange,
                                           const std::shared_ptr<const Backend>& backend,
                                           absl::StatusOr<PreparedGeneration> request, const GenerationContext& about) {
  const auto prepared = std::make_shared<absl::StatusOr<PreparedGeneration>>(std::move(request));
  if (prepared->ok()) LogRequestBegin(about.call, **prepared, *backend->model, options_.log);
  return [this, &route, exchange, about, backend, prepared] {
    if (!prepared->ok())
      return Answer(*exchange, route, ErrorResponse(ToApiError(prepared->status(), options_.overload_status)));
    if (draining_) return Answer(*exchange, route, Draining());
    const auto generation = std::make_shared<Generation>(backend, options_, exchange, std::move(**prepared), about);
    generation->Start(inboxes_[exchange->io_thread()]);
  };
}

void ApiHandler::Generate(const Route& route, const std::shared_ptr<Exchange>& exchange) {
  if (options_.request_timeout.count() > 0) exchange->LimitTime(options_.request_timeout);
  RequestContext context;
  context.id = exchange->id();
  context.tenant = TenantOf(route, *exchange);
  context.created = absl::ToUnixSeconds(absl::Now());
  const GenerationContext about{{context.id, context.tenant, std::string(route.path), exchange->arrived(),
                                 BeginTrace(options_.traces, TraceparentOf(exchange->head()))},
                                intake_};
  context.id_seed = RandomSeed();
  context.cache_epoch = intake_->cache_epochs.Of(context.tenant);
  context.random_seed = options_.seed ? *options_.seed : RandomSeed();
  auto read = [this, &route, exchange, about, context,
               backend = backend()](const std::shared_ptr<CancelToken>& cancel) mutable -> Continuation {
    context.cancel = cancel.get();
    auto request = ParseGeneration(route, exchange->body(), *backend, context);
    if (!request.ok())
      return [this, &route, exchange, status = request.status()] {
        Answer(*exchange, route, ErrorResponse(ToApiError(status, options_.overload_status)));
      };
    context.may_compile = false;
    auto prepared = Prepare(*request, *backend->model, context);
    if (!NeedsCompiling(prepared.status())) return Begin(route, exchange, backend, std::move(prepared), about);
    context.may_compile = true;
    const auto compile = [this, &route, exchange, about, context, backend,
                          parsed = *std::move(request)](const std::shared_ptr<CancelToken>&) {
      return Begin(route, exchange, backend, Prepare(parsed, *backend->model, context), about);
    };
    const absl::Status posted = intake_->grammars.TryPost(TaskOf(context.tenant, exchange, cancel, compile));
    if (posted.ok()) return nullptr;
    return [this, &route, exchange, backend, posted] { Answer(*exchange, route, Busy(*backend, posted)); };
  };
  OnWorker(route, context.tenant, exchange, std::move(read));
}

void ApiHandler::Tokenize(const Route& route, std::shared_ptr<Exchange> exchange) {
  const auto tokenize = [this, &route, exchange,
                         backend = backend()](const std::shared_ptr<CancelToken>& cancel) -> Continuation {
    const auto body = [&]() -> absl::StatusOr<std::string> {
      DT_ASSIGN_OR_RETURN(const Json json, ParseJson(exchange->body(), options_.json));
      if (cancel->cancelled()) return absl::CancelledError("the client left");
      if (route.id == RouteId::kDetokenize) {
        DT_ASSIGN_OR_RETURN(const DetokenizeRequest request, ParseDetokenizeRequest(json, *backend->model));
        return DetokenizeBody(request, *backend->model);
      }
      if (route.id == RouteId::kCountTokens) {
        DT_ASSIGN_OR_RETURN(const ChatRequest request, ParseCountTokensRequest(json, *backend->model));
        return CountTokensBody(request, *backend->model);
      }
      DT_ASSIGN_OR_RETURN(const TokenizeRequest request, ParseTokenizeRequest(json, *backend->model));
      if (route.id == RouteId::kApplyTemplate) return ApplyTemplateBody(request, *backend->model);
      return TokenizeBody(request, *backend->model, UsableLength(*backend));
    }();
    auto response = std::make_shared<HttpResponse>(
        body.ok() ? JsonResponse(*body) : ErrorResponse(ToApiError(body.status(), options_.overload_status)));
    return [this, &route, exchange, response] { Answer(*exchange, route, std::move(*response)); };
  };
  OnWorker(route, TenantOf(route, *exchange), exchange, tokenize);
}

}  // namespace dovetail::server
