#include "engine/remote_engine.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/thread_name.h"
#include "control/awake_silence.h"
#include "control/cache_messages.h"
#include "control/convert.h"
#include "control/generation_messages.h"
#include "model/rope.h"

namespace dovetail::engine {

namespace pb = control::v1;

namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
constexpr absl::Duration kBetweenLooks = absl::Milliseconds(250);  // at a scheduler that may have stopped

std::chrono::system_clock::time_point DeadlineIn(absl::Duration timeout) {
  return std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout);
}

pb::CacheEvents LostCache() {
  pb::CacheEvents events;
  events.set_reset(true);
  return events;
}

absl::Status Lost() { return absl::UnavailableError("the scheduler was lost; try again"); }

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteEngine>> RemoteEngine::Connect(const RemoteEngineOptions& options) {
  std::unique_ptr<RemoteEngine> engine(new RemoteEngine(options));
  DT_RETURN_IF_ERROR(options.security.Validate());
  DT_RETURN_IF_ERROR(engine->MakeStub());
  DT_RETURN_IF_ERROR(engine->WaitForModel());
  DT_RETURN_IF_ERROR(engine->GetFiles());
  engine->Start();
  return engine;
}

// Returns when the scheduler's first statistics have come, or some seconds later.
void RemoteEngine::Start() {
  thread_ = std::thread([this] { Run(); });
  MutexLock lock(mutex_);
  changed_.wait_for(lock, std::chrono::seconds(5),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return connected_; });
}

RemoteEngine::~RemoteEngine() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  EndEverything(requests::FinishReason::kCancelled, absl::UnavailableError("the server was stopped"));
}

// A channel that failed waits longer and longer before it connects again, and then only while it is asked: a new one
// connects at once.
absl::Status RemoteEngine::MakeStub() {
  DT_ASSIGN_OR_RETURN(channel_, control::MakeChannel("--scheduler", options_.scheduler, options_.security));
  stub_ = pb::Generation::NewStub(channel_);
  return absl::OkStatus();
}

absl::Status RemoteEngine::GetModel(pb::GetModelReply& reply) {
  grpc::ClientContext context;
  control::AddToken(options_.security, context);
  context.set_deadline(DeadlineIn(absl::Seconds(5)));
  const grpc::Status status = stub_->GetModel(&context, pb::GetModelRequest(), &reply);
  if (status.ok()) return absl::OkStatus();
  // What the scheduler itself says needs no explanation.
  if (status.error_message().rfind("no compute worker", 0) == 0) return absl::UnavailableError(status.error_message());
  DT_RETURN_IF_ERROR(MakeStub());
  return control::ExplainCallFailure("scheduler", options_.scheduler, options_.security, status);
}

absl::Status RemoteEngine::WaitForModel() {
  const absl::Time give_up = SystemClock().Now() + options_.connect_timeout;
  pb::GetModelReply reply;
  std::string said;
  while (true) {
    const absl::Status status = GetModel(reply);
    if (status.ok()) break;
    if (!absl::IsUnavailable(status) || SystemClock().Now() >= give_up) return status;
    // What gRPC says in brackets changes from one attempt to the next.
    const std::string why(status.message().substr(0, status.message().find(" (")));
    if (said != why) LogInfo("waiting: ", std::string(status.message()));
    said = why;
    if (!PauseBeforeRetry() || (options_.cancelled && options_.cancelled())) return absl::CancelledError("stopped");
  }
  DT_ASSIGN_OR_RETURN(model_, control::FromProto(reply.model()));
  if (reply.max_model_len() < 1 || reply.max_model_len() > model_.max_positions)
    return InvalidArgument("scheduler ", options_.scheduler, ": says that sequences have ", reply.max_model_len(),
                           " tokens");
  max_model_len_ = static_cast<int>(reply.max_model_len());
  max_num_seqs_ = static_cast<int>(std::min<uint32_t>(reply.max_num_seqs(), 1 << 20));
  max_queued_requests_ = static_cast<int>(std::min<uint32_t>(reply.max_queued_requests(), 1 << 20));
  MutexLock lock(mutex_);
  stats_.max_queued_requests = max_queued_requests_;
  stats_.last_progress = SystemClock().Now();
  return absl::OkStatus();
}

absl::Status RemoteEngine::GetFiles() {
  grpc::ClientContext context;
  control::AddToken(options_.security, context);
  context.set_deadline(DeadlineIn(absl::Seconds(60)));
  pb::GetModelFilesRequest request;
  request.set_digest(model_.digest);
  const auto reader = stub_->GetModelFiles(&context, request);
  for (const control::FileSummary& file : model_.files) files_.push_back({file.name, {}});
  pb::ModelFileChunk chunk;
  uint64_t total = 0;
  while (reader->Read(&chunk)) {
    total += chunk.data().size();
    if (chunk.file() >= files_.size() || total > control::kMaxModelFileBytes) {
      context.TryCancel();
      return InvalidArgument("scheduler ", options_.scheduler, ": sends model files that it did not announce");
    }
    files_[chunk.file()].bytes += chunk.data();
  }
  if (const grpc::Status status = reader->Finish(); !status.ok())
    return control::ExplainCallFailure("scheduler", options_.scheduler, options_.security, status);
  for (size_t i = 0; i < files_.size(); ++i) {
    const Sha256Digest digest = Sha256(std::as_bytes(std::span(files_[i].bytes.data(), files_[i].bytes.size())));
    if (std::string(reinterpret_cast<const char*>(digest.data()), digest.size()) != model_.files[i].sha256)
      return DataLoss("scheduler ", options_.scheduler, ": ", files_[i].name, " came damaged; try again");
  }
  return absl::OkStatus();
}

absl::Status RemoteEngine::CheckSameModel() {
  pb::GetModelReply reply;
  DT_RETURN_IF_ERROR(GetModel(reply));
  if (reply.model().digest() == model_.digest) return absl::OkStatus();
  return FailedPrecondition("the scheduler is back with another model, ", reply.model().name(),
                            "; restart this server");
}

absl::Status RemoteEngine::CheckRequest(const requests::GenerationRequest& request) const {
  if (request.prompt.empty()) return InvalidArgument("prompt: has no token");
  for (const TokenId token : request.prompt)
    if (token < 0 || token >= model_.vocab_size)
      return InvalidArgument("prompt: token ", token, " is outside the vocabulary of ", model_.vocab_size);
  const bool wants_vector = request.pooling != requests::Pooling::kNone;
  const int64_t longest = max_model_len_ - (wants_vector ? 0 : 1);
  if (static_cast<int64_t>(request.prompt.size()) > longest)
    return InvalidArgument("prompt: ", request.prompt.size(),
                           " tokens leave no room for output; sequences have at most ", max_model_len_,
                           " tokens (--max-model-len)");
  if (request.choices < 1 || request.choices > requests::kMaxChoices)
    return InvalidArgument("n: ", request.choices, " is outside 1..", requests::kMaxChoices);
  if (wants_vector && request.max_tokens != 0)
    return InvalidArgument("max_tokens: ", request.max_tokens, " tokens with a vector; ask for 0");
  if (!wants_vector && request.max_tokens < 1)
    return InvalidArgument("max_tokens: ", request.max_tokens, " is not positive");
  return absl::OkStatus();
}

absl::StatusOr<RequestId> RemoteEngine::Submit(requests::GenerationRequest request,
                                               std::shared_ptr<GenerationSink> sink) {
  DT_RETURN_IF_ERROR(CheckRequest(request));
  // As in the embedded engine: rotated keys of length-dependent rope kinds are shared only between sequences that
  // rotate alike.
  for (const control::LengthRope& rope : model_.length_ropes) {
    model::RopeSpec spec;
    spec.kind = static_cast<model::RopeKind>(rope.kind);
    spec.max_positions = rope.max_positions;
    spec.original_max_positions = rope.original_max_positions;
    if (const int64_t variant = model::RopeVariant(spec, static_cast<int64_t>(request.prompt.size())); variant != 0)
      absl::StrAppend(&request.cache_salt, "|rope", variant);
  }
  pb::GenerationCommand command;
  control::ToProto(request, *command.mutable_submit());
  RequestId id;
  {
    MutexLock lock(mutex_);
    if (stopping_) return absl::UnavailableError("the server is stopping");
    if (!connected_) return absl::UnavailableError("the scheduler cannot be reached");
    // As in the embedded engine: the scheduler says which tenant gives way in a full queue.
    if (static_cast<int>(sinks_.size()) >= 2 * max_queued_requests_ + max_num_seqs_)
      return ResourceExhausted("the queue is full: ", sinks_.size(), " requests are being served or waiting");
    id = RequestId(next_request_++);
    command.set_request(id.value());
    sinks_[id] = std::move(sink);
    commands_.push_back(std::move(command));
  }
  changed_.notify_all();
  return id;
}

void RemoteEngine::Enqueue(pb::GenerationCommand command) {
  {
    MutexLock lock(mutex_);
    // Of a request that has ended nothing is sent, so that the queue is bounded by the requests.
    if (!connected_ || !sinks_.contains(RequestId(command.request()))) return;
    commands_.push_back(std::move(command));
  }
  changed_.notify_all();
}

void RemoteEngine::Cancel(RequestId request) {
  pb::GenerationCommand command;
  command.set_request(request.value());
  command.mutable_cancel();
  Enqueue(std::move(command));
}
void RemoteEngine::StopChoice(RequestId request, int choice) {
  pb::GenerationCommand command;
  command.set_request(request.value());
  command.mutable_stop_choice()->set_choice(choice);
  Enqueue(std::move(command));
}
void RemoteEngine::Pause(RequestId request) {
  pb::GenerationCommand command;
  command.set_request(request.value());
  command.mutable_pause();
  Enqueue(std::move(command));
}
void RemoteEngine::Resume(RequestId request) {
  pb::GenerationCommand command;
  command.set_request(request.value());
  command.mutable_resume();
  Enqueue(std::move(command));
}

void RemoteEngine::WatchCache(std::shared_ptr<CacheSink> sink) {
  {
    MutexLock lock(mutex_);
    cache_sink_ = std::move(sink);
    if (!connected_) return;  // it is asked for once there is a connection
    commands_.emplace_back().mutable_watch_cache();
  }
  changed_.notify_all();
}

void RemoteEngine::TakeCache(const pb::CacheEvents& from) {
  std::shared_ptr<CacheSink> sink;
  {
    MutexLock lock(mutex_);
    sink = cache_sink_;
  }
  if (sink == nullptr) return;
  auto events = control::FromProto(from);
  if (events.ok()) return sink->OnCacheEvents(*std::move(events));
  LogError("scheduler: ", std::string(events.status().message()),
           "; what the prefix cache holds is not known any more");
  sink->OnCacheEvents({.reset = true, .events = {}});
}

EngineStats RemoteEngine::stats() {
  MutexLock lock(mutex_);
  EngineStats stats = stats_;
  stats.own_certificate_end = certificate_.end();
  return stats;
}

std::vector<StepSample> RemoteEngine::TakeStepSamples() {
  MutexLock lock(mutex_);
  std::vector<StepSample> samples(step_samples_.begin(), step_samples_.end());
  step_samples_.clear();
  return samples;
}

void RemoteEngine::Deliver(requests::GenerationUpdate update) {
  std::shared_ptr<GenerationSink> sink;
  {
    MutexLock lock(mutex_);
    const auto it = sinks_.find(update.request);
    if (it == sinks_.end()) return;
    sink = it->second;
    if (update.request_finished) sinks_.erase(it);
  }
  sink->OnUpdate(std::move(update));
}

void RemoteEngine::Take(const pb::GenerationEvents& events) {
  for (const pb::Update& from : events.updates()) {
    auto update = control::FromProto(from);
    if (!update.ok()) {
      LogError("scheduler: ", std::string(update.status().message()));
      update = requests::GenerationUpdate{};
      update->request = RequestId(from.request());
      update->choice_finished = update->request_finished = true;
      update->reason = requests::FinishReason::kError;
      update->error = "the scheduler sent an update that is not valid";
      update->error_code = absl::StatusCode::kInternal;
    }
    Deliver(*std::move(update));
  }
  for (const pb::CacheEvents& from : events.cache()) TakeCache(from);
  MutexLock lock(mutex_);
  heard_ = SystemClock().Now();
  for (const pb::StepSample& sample : events.steps()) {
    if (step_samples_.size() == kMaxStepSamples) step_samples_.pop_front();
    step_samples_.push_back({static_cast<int>(sample.new_tokens()), static_cast<int>(sample.sequences()),
                             sample.total_us(), sample.dense_us(), sample.attention_wait_us(), sample.sample_us(),
                             sample.attention_us(), sample.prompt_us(), sample.overlapped_us()});
  }
  if (events.has_stats()) TakeStats(events.stats());
}

void RemoteEngine::TakeStats(const pb::Stats& from) {
  scheduler::SchedulerStats& to = stats_.scheduler;
  to.running_sequences = static_cast<int>(from.running_sequences());
  to.waiting_requests = static_cast<int>(from.waiting_requests());
  to.paused_requests = static_cast<int>(from.paused_requests());
  to.kv_usage = from.kv_usage();
  to.preemptions = from.preemptions();
  to.prompt_tokens = from.prompt_tokens();
  to.generation_tokens = from.generation_tokens();
  to.prefix_queries = from.prefix_queries();
  to.prefix_hits = from.prefix_hits();
  to.steps = from.steps();
  to.late_events = from.late_events();
  to.damaged = from.damaged();
  to.longest_sequence = static_cast<Position>(std::min<uint64_t>(from.longest_sequence(), max_model_len_));
  to.replays_same = from.replays_same();
  to.replays_different = from.replays_different();
  to.replays_unclear = from.replays_unclear();
  to.prefill_groups = from.prefill_groups();
  to.prefill_group_tokens = from.prefill_group_tokens();
  to.shortened_chunks = from.shortened_chunks();
  to.prefix_asked_bytes = from.prefix_asked_bytes();
  to.prefix_gathered_bytes = from.prefix_gathered_bytes();
  to.prefix_state_bytes = from.prefix_state_bytes();
  to.prefix_chain_bytes = from.prefix_chain_bytes();
  to.prefix_direct_bytes = from.prefix_direct_bytes();
  to.prefix_ring_bytes = from.prefix_ring_bytes();
  to.prefix_switch_bytes = from.prefix_switch_bytes();
  to.prefix_pass_q_bytes = from.prefix_pass_q_bytes();
  to.spilled_tokens = from.spilled_tokens();
  to.fetched_tokens = from.fetched_tokens();
  for (const auto& times : from.prefill_times())
    for (size_t e = 0; e < to.prefill_times.size(); ++e)
      if (times.exchange() == NameOf(proto::WayAt(e)))
        to.prefill_times[e] = {times.predicted_s(), times.measured_s(), times.next_best_s(), times.had_other_s()};
  stats_.kv_blocks_total = from.kv_blocks_total();
  stats_.kv_blocks_in_use = from.kv_blocks_in_use();
  stats_.kv_blocks_cached = from.kv_blocks_cached();
  stats_.damaged_blocks.clear();
  for (const pb::DamagedBlocks& damaged : from.damaged_blocks())
    stats_.damaged_blocks.push_back({damaged.worker(), damaged.node(), damaged.blocks()});
  stats_.workers.clear();
  for (const pb::WorkerLoad& load : from.workers())
    stats_.workers.push_back({load.worker(), load.role(), load.serving(), load.steps(), load.kv_blocks(),
                              load.kv_blocks_in_use(), load.host_links(), load.certificate_end()});
  stats_.scheduler_certificate_end = from.certificate_end();
  stats_.healthy = from.healthy();
  stats_.error = from.error();
  stats_.last_progress = SystemClock().Now() - absl::Microseconds(from.idle_us());
}

void RemoteEngine::EndEverything(requests::FinishReason reason, const absl::Status& status) {
  absl::flat_hash_map<RequestId, std::shared_ptr<GenerationSink>> sinks;
  {
    MutexLock lock(mutex_);
    sinks.swap(sinks_);
    commands_.clear();
  }
  for (auto& [id, sink] : sinks) {
    requests::GenerationUpdate update;
    update.request = id;
    update.reason = reason;
    update.choice_finished = update.request_finished = true;
    update.error = std::string(status.message());
    update.error_code = status.code();
    sink->OnUpdate(std::move(update));
  }
}

bool RemoteEngine::PauseBeforeRetry() {
  MutexLock lock(mutex_);
  return !changed_.wait_for(lock, absl::ToChronoMilliseconds(kRetryPause),
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; });
}

// One thread writes, so that Submit never blocks on a slow scheduler; what gathers meanwhile travels together. It also
// ends the stream of a scheduler that stopped: the connection stands as long as its kernel answers.
void RemoteEngine::WriteCommands(Stream& stream) {
  NameThread("dt-commands");
  MutexLock lock(mutex_);
  control::AwakeSilence awake(kBetweenLooks, heard_, SystemClock().Now());
  while (true) {
    if (awake.Look(heard_, SystemClock().Now()) >= kSilence) {
      LogError("scheduler ", options_.scheduler, ": says nothing for ", absl::FormatDuration(kSilence));
      return context_->TryCancel();
    }
    changed_.wait_for(lock, absl::ToChronoMilliseconds(kBetweenLooks), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stream_ended_ || stopping_ || !commands_.empty();
    });
    if (stream_ended_ || stopping_) return;
    if (commands_.empty()) continue;
    std::vector<pb::GenerationCommand> taken;
    taken.swap(commands_);
    lock.unlock();
    size_t next = 0;
    bool open = true;
    while (open && next < taken.size()) {
      pb::GenerationCommands message;
      size_t bytes = 0;
      do {
        bytes += taken[next].ByteSizeLong();
        *message.add_commands() = std::move(taken[next++]);
      } while (next < taken.size() && bytes + taken[next].ByteSizeLong() < control::kMaxMessageBytes / 4);
      open = stream.Write(message);
    }
    lock.lock();
    if (!open) return;
  }
}

void RemoteEngine::ServeOneStream() {
  grpc::ClientContext* context = nullptr;
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    context_ = std::make_unique<grpc::ClientContext>();
    context = context_.get();
    control::AddToken(options_.security, *context);
    stream_ended_ = false;
  }
  const auto stream = stub_->Open(context);
  pb::GenerationEvents events;
  bool open = stream->Read(&events);  // the first stats: it is there
  std::thread writer;
  if (open) {
    {
      MutexLock lock(mutex_);
      connected_ = true;
      if (cache_sink_ != nullptr) commands_.emplace_back().mutable_watch_cache();
      heard_ = SystemClock().Now();
    }
    changed_.notify_all();
    writer = std::thread([&] { WriteCommands(*stream); });
  }
  while (open) {
    Take(events);
    open = stream->Read(&events);
  }
  {
    MutexLock lock(mutex_);
    connected_ = false;
    stream_ended_ = true;
    stats_.healthy = false;
    stats_.error = "the scheduler cannot be reached";
    stats_.workers.clear();
    context_->TryCancel();
  }
  changed_.notify_all();
  if (writer.joinable()) writer.join();
  const grpc::Status status = stream->Finish();
  MutexLock lock(mutex_);
  if (!stopping_)
    LogError("scheduler ", options_.scheduler, ": lost (", status.error_message().substr(0, 200),
             "); requests end, new ones get 503");
  context_.reset();
}

void RemoteEngine::Run() {
  NameThread("dt-updates");
  while (true) {
    ServeOneStream();
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    EndEverything(requests::FinishReason::kError, Lost());
    TakeCache(LostCache());
    std::string said;
    while (true) {
      if (!PauseBeforeRetry()) return;
      const absl::Status same = CheckSameModel();
      if (same.ok()) break;
      if (absl::IsFailedPrecondition(same) && said != same.message()) LogError(std::string(same.message()));
      said = std::string(same.message());
      MutexLock lock(mutex_);
      stats_.error = said;
    }
    LogInfo("scheduler ", options_.scheduler, ": back");
  }
}

}  // namespace dovetail::engine
