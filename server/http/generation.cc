#include "server/http/generation.h"

#include <algorithm>

#include "base/clock.h"
#include "base/log.h"
#include "server/http/responses.h"

namespace dovetail::server {
namespace {

constexpr size_t kHardBacklogFactor =
    16;  // times max_stream_backlog_bytes: a stall of our own must not look like a slow reader

constexpr size_t kVectorsAtOnce = 64;  // of one request, so that others find room in the queue

constexpr char kKeepAliveFrame[] = ": keep-alive\n\n";  // a comment, which every reader of such streams skips

class Sink : public engine::GenerationSink {
 public:
  Sink(std::shared_ptr<UpdateInbox> inbox, std::shared_ptr<Generation> generation, int prompt)
      : inbox_(std::move(inbox)), generation_(std::move(generation)), prompt_(prompt) {}
  void OnUpdate(requests::GenerationUpdate update) override { inbox_->Push(generation_, prompt_, std::move(update)); }

 private:
  const std::shared_ptr<UpdateInbox> inbox_;
  const std::shared_ptr<Generation> generation_;
  const int prompt_;
};

}  // namespace

Generation::Generation(std::shared_ptr<const Backend> backend, const HttpServerOptions& options,
                       std::shared_ptr<Exchange> exchange, PreparedGeneration prepared, GenerationContext context)
    : backend_(std::move(backend)),
      options_(options),
      exchange_(std::move(exchange)),
      requests_(std::move(prepared.requests)),
      response_(backend_->model, std::move(prepared.spec)),
      prompts_(requests_.size()),
      context_(std::move(context)),
      account_(*backend_->metrics, context_.call) {
  for (requests::GenerationRequest& request : requests_) {
    account_.AddPrompt(request);
    request.trace = context_.call.trace.context;
  }
}

absl::Status Generation::SubmitNext() {
  const size_t most = response_.spec().vectors() ? kVectorsAtOnce : prompts_.size();
  for (; submitted_ < prompts_.size() && submitted_ - engine_finished_ < most; ++submitted_) {
    const size_t p = submitted_;
    auto sink = std::make_shared<Sink>(inbox_, shared_from_this(), static_cast<int>(p));
    // Unique while the engine knows any of the prompts, since the sinks keep this object alive.
    if (prompts_.size() > 1) requests_[p].call = reinterpret_cast<uintptr_t>(this);
    DT_ASSIGN_OR_RETURN(prompts_[p].id, backend_->engine->Submit(std::move(requests_[p]), std::move(sink)));
    prompts_[p].submitted = true;
    account_.Submitted(static_cast<int>(p), SystemClock().Now());
  }
  if (submitted_ < prompts_.size()) return absl::OkStatus();
  requests_.clear();
  inbox_.reset();
  return absl::OkStatus();
}

void Generation::SubmitNextOrFail() {
  const absl::Status status = SubmitNext();
  if (status.ok()) return;
  requests_.clear();
  inbox_.reset();
  CancelInEngine();
  response_.Fail(status);
  Answer(ErrorFor(status));
  Finish();
}

void Generation::Start(const std::shared_ptr<UpdateInbox>& inbox) {
  context_.intake->admission.Began(context_.call.tenant, static_cast<int>(prompts_.size()));
  inbox_ = inbox;
  SubmitNextOrFail();
  if (exchange_ == nullptr) return;
  const auto self = shared_from_this();
  exchange_->on_gone = [self] { self->OnGone(); };
  exchange_->on_drained = [self] { self->OnDrained(); };
  exchange_->on_shutdown = [self] { self->OnShutdown(); };
  exchange_->on_timeout = [self] { self->OnTimeout(); };
  if (response_.spec().stream && options_.stream_keep_alive.count() > 0)
    exchange_->KeepAlive(options_.stream_keep_alive, kKeepAliveFrame);
}

HttpResponse Generation::ErrorFor(const absl::Status& status) const {
  const int waiting = backend_->engine->stats().scheduler.waiting_requests;
  return ErrorResponse(status, options_.overload_status,
                       context_.intake->admission.RetryAfterSeconds(waiting, SystemClock().Now()));
}

void Generation::Answer(HttpResponse response) {
  ShapeError(response_.spec().shape, response);
  CountAnswer(response.status);
  exchange_->Respond(response);
}

void Generation::CountAnswer(int status) {
  if (std::exchange(answered_, status) == 0) backend_->metrics->HttpResponse(context_.call.route, "POST", status);
}

void Generation::OnUpdate(int p, const requests::GenerationUpdate& update) {
  PromptState& prompt = prompts_[p];
  if (update.request_finished && !std::exchange(prompt.engine_finished, true)) ++engine_finished_;
  if (exchange_ == nullptr) return;
  account_.Updated(p, update.cached_tokens, update.queued_us, SystemClock().Now());
  const bool refused =
      update.error_code == absl::StatusCode::kAborted || update.error_code == absl::StatusCode::kResourceExhausted;
  if (update.reason == requests::FinishReason::kError && update.choice_finished && !refused)
    LogError("request ", exchange_->id(), " failed: ", update.error);
  const GenerationResponse::Effects effects = response_.OnUpdate(p, update);
  account_.Tokens(p, update.choice, effects.tokens, SystemClock().Now());
  for (const auto& stop : effects.stops)
    if (!prompts_[stop.prompt].engine_finished) backend_->engine->StopChoice(prompts_[stop.prompt].id, stop.choice);
  Show(effects);
  if (exchange_ != nullptr && inbox_ != nullptr) SubmitNextOrFail();
}

void Generation::Show(const GenerationResponse::Effects& effects) {
  if (response_.spec().stream && (response_.failure().ok() || exchange_->streaming())) {
    if (!effects.frames.empty()) {
      CountAnswer(200);
      exchange_->StartStream();
      exchange_->Write(effects.frames, effects.tokens);
    }
    if (effects.done)
      exchange_->EndStream();
    else
      WatchBacklog();
  } else if (effects.done) {
    Answer(response_.failure().ok() ? JsonResponse(response_.Body()) : ErrorFor(response_.failure()));
  }
  if (effects.done && exchange_ != nullptr) {
    if (!response_.failure().ok()) CancelInEngine();
    Finish();
  }
}

// At half of the bytes that a stream may hold back, the engine pauses it; tokens that were under way still arrive. The
// connection cuts off a client that then reads nothing for a while. Memory has a bound of its own, should the engine
// not pause.
void Generation::WatchBacklog() {
  if (exchange_ == nullptr) return;
  const Exchange::Backlog backlog = exchange_->backlog();
  if (!paused_) {
    if (backlog.bytes < options_.max_stream_backlog_bytes / 2 &&
        backlog.tokens < options_.max_stream_backlog_tokens / 2)
      return;
    paused_ = true;
    bytes_when_paused_ = backlog.bytes;  // one frame may be large: log probabilities of a long prompt
    for (const PromptState& prompt : prompts_)
      if (!prompt.engine_finished) backend_->engine->Pause(prompt.id);
    return;
  }
  if (backlog.bytes > bytes_when_paused_ + kHardBacklogFactor * options_.max_stream_backlog_bytes)
    exchange_->Abort();  // comes back as OnGone
}

void Generation::OnDrained() {
  if (!paused_ || exchange_ == nullptr) return;
  paused_ = false;
  for (const PromptState& prompt : prompts_)
    if (!prompt.engine_finished) backend_->engine->Resume(prompt.id);
}

void Generation::OnGone() {
  if (exchange_ == nullptr) return;
  gone_ = true;
  CountAnswer(499);
  if (paused_) backend_->metrics->SlowReaderCancelled();
  CancelInEngine();
  response_.Fail(absl::CancelledError("the client left"));
  Finish();
}

void Generation::OnShutdown() { EndWith(absl::UnavailableError("the server is shutting down")); }

void Generation::OnTimeout() { EndWith(RequestTimedOut(options_.request_timeout)); }

void Generation::EndWith(const absl::Status& why) {
  if (exchange_ == nullptr) return;
  GenerationResponse::Effects effects;
  effects.frames = response_.Fail(why);
  effects.done = true;
  Show(effects);
}

void Generation::CancelInEngine() {
  for (const PromptState& prompt : prompts_)
    if (prompt.submitted && !prompt.engine_finished) backend_->engine->Cancel(prompt.id);
}

RequestEnd Generation::EndOf(int p) const {
  if (gone_) return RequestEnd::kAbort;
  if (!response_.failure().ok()) return RequestEnd::kError;
  for (int c = 0; c < response_.spec().best_of && !response_.spec().vectors(); ++c)
    if (response_.FinishReason(p, c) == "length") return RequestEnd::kLength;
  return RequestEnd::kStop;
}

void Generation::Finish() {
  const absl::Time now = SystemClock().Now();
  context_.intake->admission.Ended(context_.call.tenant, static_cast<int>(prompts_.size()), now);
  std::vector<RequestEnd> ends;
  for (size_t p = 0; p < prompts_.size(); ++p) ends.push_back(EndOf(static_cast<int>(p)));
  account_.Finish(std::to_string(answered_), ends, now);
  exchange_->on_gone = exchange_->on_drained = exchange_->on_shutdown = exchange_->on_timeout = nullptr;
  exchange_.reset();
}

}  // namespace dovetail::server
