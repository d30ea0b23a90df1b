#include "server/grpc/embed_call.h"

#include <chrono>
#include <utility>

#include "base/clock.h"
#include "control/security.h"
#include "server/openai/embeddings.h"

namespace dovetail::server {

void EmbedCall::LimitTime(absl::Duration limit) {
  time_limit_.Set(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit),
                  [weak = weak_from_this(), limit](bool expired) {
                    if (const auto self = weak.lock(); expired && self != nullptr) self->TimeOut(limit);
                  });
}

void EmbedCall::TimeOut(absl::Duration limit) {
  {
    const MutexLock lock(mutex_);
    CancelInEngine();
    End(TimedOut(limit));
  }
  server_.intake.Cancel(*cancel());
}

void EmbedCall::Refuse(const absl::Status& status) {
  const absl::Status told = ToldRefusal(status, server_);
  const MutexLock lock(mutex_);
  End(control::ToGrpc(told));
}

void EmbedCall::Begin(const ServedModel& model, PreparedGeneration prepared) {
  {
    const MutexLock lock(mutex_);
    if (cancel()->cancelled()) return End(grpc::Status(grpc::StatusCode::CANCELLED, "the request was aborted"));
    server_.intake.admission.Began(account_.call().tenant, 1);
    admitted_ = true;
    requests::GenerationRequest& request = prepared.requests.front();
    account_.AddPrompt(request);
    request.trace = account_.call().trace.context;
    LogRequestBegin(account_.call(), prepared, model, server_.log);
    form_ = prepared.spec.form;
    submitted_ = true;
    waiting_tokens_ = static_cast<int64_t>(request.prompt.size());
    server_.waiting_tokens += waiting_tokens_;
  }
  const auto id = server_.engine.Submit(std::move(prepared.requests.front()), shared_from_this());
  if (!id.ok()) {
    {
      const MutexLock lock(mutex_);
      HaveBegun();
      LeaveAdmission();
    }
    return Refuse(id.status());
  }
  const MutexLock lock(mutex_);
  id_ = *id;
  account_.Submitted(0, SystemClock().Now());
  if (cancel()->cancelled()) CancelInEngine();
}

void EmbedCall::Cancel() {
  server_.intake.Cancel(*cancel());
  const MutexLock lock(mutex_);
  CancelInEngine();
}

void EmbedCall::OnUpdate(requests::GenerationUpdate update) {
  const MutexLock lock(mutex_);
  if (update.request_finished) engine_done_ = true;
  if (done_) return;  // the engine lets go of it later, when there may be no server any more
  HaveBegun();
  account_.Updated(0, update.cached_tokens, update.queued_us, SystemClock().Now());
  if (engine_done_) LeaveAdmission();
  if (ended_) return;
  if (update.reason == requests::FinishReason::kError && update.choice_finished) return End(ErrorOf(update));
  if (update.reason == requests::FinishReason::kCancelled && update.choice_finished)
    return End(grpc::Status(grpc::StatusCode::CANCELLED, "the request was aborted"));
  if (!update.pooled.empty()) {
    const std::vector<float> vector = ShapeVector(update.pooled, form_);
    reply_->mutable_embedding()->Assign(vector.begin(), vector.end());
    reply_->set_embedding_dim(static_cast<uint32_t>(vector.size()));
    reply_->set_prompt_tokens(static_cast<uint32_t>(update.prompt_tokens));
  }
  if (!update.request_finished) return;
  End(reply_->embedding_dim() > 0 ? grpc::Status::OK
                                  : grpc::Status(grpc::StatusCode::INTERNAL, "the generation failed"));
}

void EmbedCall::OnDone() {
  time_limit_.Cancel();
  {
    const MutexLock lock(mutex_);
    cancel()->Cancel();
    CancelInEngine();
    HaveBegun();
    LeaveAdmission();
    done_ = true;
  }
  self_.reset();
}

void EmbedCall::CancelInEngine() {
  if (!id_ || engine_done_ || std::exchange(cancelled_in_engine_, true)) return;
  server_.calls.Post([&engine = server_.engine, id = *id_] { engine.Cancel(id); });
}

void EmbedCall::HaveBegun() { server_.waiting_tokens -= std::exchange(waiting_tokens_, 0); }

void EmbedCall::LeaveAdmission() {
  if (std::exchange(admitted_, false)) server_.intake.admission.Ended(account_.call().tenant, 1, SystemClock().Now());
}

void EmbedCall::End(const grpc::Status& status) {
  if (std::exchange(ended_, true)) return;
  const std::string code = absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
  server_.metrics.GrpcResponse("Embed", code);
  const RequestEnd end = status.ok()                                          ? RequestEnd::kStop
                         : status.error_code() == grpc::StatusCode::CANCELLED ? RequestEnd::kAbort
                                                                              : RequestEnd::kError;
  const absl::Time now = SystemClock().Now();
  if (submitted_)
    account_.Finish(code, {end}, now);
  else
    LogCallEnd(LogLevel::kInfo, account_.call(), code, now);
  on_end_();
  Finish(status);
}

}  // namespace dovetail::server
