#include "server/grpc/generate_call.h"

#include <utility>

#include "base/clock.h"
#include "control/security.h"

namespace dovetail::server {

namespace pb = vllm::grpc::engine;

namespace {

constexpr size_t kPauseAtMessages = 128;

}  // namespace

void GenerateCall::Refuse(const absl::Status& status) {
  const absl::Status told = ToldRefusal(status, server_);
  const MutexLock lock(mutex_);
  End(control::ToGrpc(told));
}

void GenerateCall::Begin(const ServedModel& model, PreparedGeneration prepared) {
  {
    const MutexLock lock(mutex_);
    if (cancel()->cancelled()) return End(grpc::Status(grpc::StatusCode::CANCELLED, "the request was aborted"));
    server_.intake.admission.Began(account_.call().tenant, 1);
    admitted_ = true;
    requests::GenerationRequest& request = prepared.requests.front();
    account_.AddPrompt(request);
    request.trace = account_.call().trace.context;
    LogRequestBegin(account_.call(), prepared, model, server_.log);
    builder_.emplace(model, std::move(prepared.spec));
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
  if (engine_done_) return;
  if (cancel()->cancelled()) return CancelInEngine();
  // What updates asked for before the id was known.
  for (const int choice : std::exchange(early_stops_, {})) StopInEngine(choice);
  PauseIfSlow();
}

// The queues let go of the task, which ends the call, without a lock.
void GenerateCall::Cancel() {
  server_.intake.Cancel(*cancel());
  const MutexLock lock(mutex_);
  CancelInEngine();
}

void GenerateCall::LimitTime(absl::Duration limit) {
  time_limit_.Set(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit),
                  [weak = weak_from_this(), limit](bool expired) {
                    if (const auto self = weak.lock(); expired && self != nullptr) self->TimeOut(limit);
                  });
}

// Its task, if it waits for one, ends behind it, and changes nothing then.
void GenerateCall::TimeOut(absl::Duration limit) {
  {
    const MutexLock lock(mutex_);
    if (ended_ || last_) return;
    CancelInEngine();
    End(TimedOut(limit));
  }
  server_.intake.Cancel(*cancel());
}

void GenerateCall::OnUpdate(requests::GenerationUpdate update) {
  const MutexLock lock(mutex_);
  if (update.request_finished) engine_done_ = true;
  if (done_) return;  // the engine lets go of it later, when there may be no server any more
  HaveBegun();
  account_.Updated(0, update.cached_tokens, update.queued_us, SystemClock().Now());
  if (engine_done_) LeaveAdmission();
  if (ended_ || last_) return;
  if (update.reason == requests::FinishReason::kError && update.choice_finished) return End(ErrorOf(update));
  if (update.reason == requests::FinishReason::kCancelled && update.choice_finished)
    return End(grpc::Status(grpc::StatusCode::CANCELLED, "the request was aborted"));
  GenerateResponseBuilder::Step step = builder_->Add(update);
  account_.Tokens(0, update.choice, step.tokens, SystemClock().Now());
  for (const int choice : step.stop_choices) StopInEngine(choice);
  for (pb::GenerateResponse& message : step.messages) queue_.push_back(std::move(message));
  if (engine_done_) {
    last_.emplace(grpc::Status::OK);
    Settle(*last_);
  }
  PauseIfSlow();
  if (!writing_) Pump();
}

void GenerateCall::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  writing_ = false;
  if (!ok && !ended_) return End(grpc::Status(grpc::StatusCode::CANCELLED, "the client is gone"));
  Pump();
}

void GenerateCall::OnDone() {
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

// It counts what is in the engine: a client that reads its last messages late holds no place.
void GenerateCall::LeaveAdmission() {
  if (std::exchange(admitted_, false)) server_.intake.admission.Ended(account_.call().tenant, 1, SystemClock().Now());
}

void GenerateCall::HaveBegun() { server_.waiting_tokens -= std::exchange(waiting_tokens_, 0); }

void GenerateCall::Ask(void (engine::Engine::*call)(RequestId)) {
  server_.calls.Post([&engine = server_.engine, id = *id_, call] { (engine.*call)(id); });
}

void GenerateCall::CancelInEngine() {
  if (id_ && !engine_done_ && !std::exchange(cancelled_in_engine_, true)) Ask(&engine::Engine::Cancel);
}

void GenerateCall::StopInEngine(int choice) {
  if (!id_) return early_stops_.push_back(choice);
  server_.calls.Post([&engine = server_.engine, id = *id_, choice] { engine.StopChoice(id, choice); });
}

void GenerateCall::PauseIfSlow() {
  if (paused_ || queue_.size() < kPauseAtMessages || !id_) return;
  paused_ = true;
  Ask(&engine::Engine::Pause);
}

void GenerateCall::End(const grpc::Status& status) {
  if (ended_) return;
  queue_.clear();
  last_ = status;
  Settle(status);
  if (!writing_) Pump();
}

void GenerateCall::Settle(const grpc::Status& status) {
  if (std::exchange(settled_, true)) return;
  const std::string code = absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
  server_.metrics.GrpcResponse("Generate", code);
  RequestEnd end = RequestEnd::kStop;
  if (status.error_code() == grpc::StatusCode::CANCELLED)
    end = RequestEnd::kAbort;
  else if (!status.ok())
    end = RequestEnd::kError;
  else if (builder_->stopped_at_length())
    end = RequestEnd::kLength;
  const absl::Time now = SystemClock().Now();
  if (builder_)
    account_.Finish(code, {end}, now);
  else
    LogCallEnd(LogLevel::kInfo, account_.call(), code, now);
}

void GenerateCall::Pump() {
  if (ended_) return;
  if (paused_ && queue_.empty()) {
    paused_ = false;
    Ask(&engine::Engine::Resume);
  }
  if (!queue_.empty()) {
    current_ = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    StartWrite(&current_);
  } else if (last_) {
    ended_ = true;
    on_end_();
    Finish(*last_);
  }
}

}  // namespace dovetail::server
