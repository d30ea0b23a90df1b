#include "server/grpc/generation_service.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/thread_name.h"
#include "control/listening.h"
#include "control/messages.h"
#include "control/security.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/credentials.h"
#include "server/grpc/generate_request.h"
#include "server/grpc/generate_response.h"
#include "server/http/key_ring.h"

namespace dovetail::server {

namespace pb = vllm::grpc::engine;

namespace {

constexpr size_t kPauseAtMessages = 128;
constexpr absl::Duration kHealthInterval = absl::Milliseconds(200);
constexpr const char* kServiceName = "vllm.grpc.engine.VllmEngine";

// The engine must not be called from a sink: what updates ask of it is done on this thread.
class EngineCalls {
 public:
  EngineCalls() : thread_([this] { Run(); }) {}
  ~EngineCalls() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  void Post(std::function<void()> call) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls_.push_back(std::move(call));
    }
    wake_.notify_all();
  }
  void SetPeriodic(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    periodic_ = std::move(work);
  }

 private:
  void Run() {
    NameThread("dt-grpc-calls");
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ || !calls_.empty()) {
      if (calls_.empty()) wake_.wait_for(lock, absl::ToChronoMilliseconds(kHealthInterval));
      std::deque<std::function<void()>> taken;
      taken.swap(calls_);
      const std::function<void()> periodic = periodic_;
      lock.unlock();
      for (auto& call : taken) call();
      if (periodic) periodic();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> calls_;
  std::function<void()> periodic_;
  bool stopping_ = false;
  std::thread thread_;
};

grpc::Status ErrorOf(const scheduler::GenerationUpdate& update) {
  absl::StatusCode code = update.error_code;
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kInternal;
  // A tenant that has its part of a full queue.
  if (code == absl::StatusCode::kAborted) code = absl::StatusCode::kResourceExhausted;
  // What an internal error says (paths, addresses) never leaves the process.
  if (code == absl::StatusCode::kInternal) return grpc::Status(grpc::StatusCode::INTERNAL, "the generation failed");
  return grpc::Status(static_cast<grpc::StatusCode>(code), update.error);
}

// One Generate call. Kept alive by gRPC until OnDone and by the engine until the request's end.
class GenerateCall final : public grpc::ServerWriteReactor<pb::GenerateResponse>,
                           public GenerationSink,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  GenerateCall(EngineCalls& calls, Engine& engine, std::function<void()> on_done)
      : calls_(calls), engine_(engine), on_done_(std::move(on_done)) {}

  void KeepUntilDone(std::shared_ptr<GenerateCall> self) { self_ = std::move(self); }
  void Refuse(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    End(control::ToGrpc(status));
  }
  void Begin(const ServedModel& model, PreparedGeneration prepared) {
    builder_.emplace(model, std::move(prepared.spec));
    const auto id = engine_.Submit(std::move(prepared.requests.front()), shared_from_this());
    if (!id.ok()) return Refuse(id.status());
    std::lock_guard<std::mutex> lock(mutex_);
    id_ = *id;
    if (engine_done_) return;
    if (cancelled_) return Ask(&Engine::Cancel);
    // What updates asked for before the id was known.
    for (const int choice : std::exchange(early_stops_, {})) StopInEngine(choice);
    PauseIfSlow();
  }
  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    if (id_ && !engine_done_) Ask(&Engine::Cancel);
  }

  // On the engine's thread.
  void OnUpdate(scheduler::GenerationUpdate update) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (update.request_finished) engine_done_ = true;
    if (ended_ || last_) return;
    if (update.reason == scheduler::FinishReason::kError && update.choice_finished) return End(ErrorOf(update));
    if (update.reason == scheduler::FinishReason::kCancelled && update.choice_finished)
      return End(grpc::Status(grpc::StatusCode::CANCELLED, "the request was aborted"));
    GenerateResponseBuilder::Step step = builder_->Add(update);
    for (const int choice : step.stop_choices) StopInEngine(choice);
    for (pb::GenerateResponse& message : step.messages) queue_.push_back(std::move(message));
    if (engine_done_) last_.emplace(grpc::Status::OK);
    PauseIfSlow();
    if (!writing_) Pump();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    if (!ok && !ended_) return End(grpc::Status(grpc::StatusCode::CANCELLED, "the client is gone"));
    Pump();
  }
  void OnCancel() override { Cancel(); }
  void OnDone() override {
    Cancel();
    on_done_();
    self_.reset();
  }

 private:
  void Ask(void (Engine::*call)(RequestId)) {
    calls_.Post([&engine = engine_, id = *id_, call] { (engine.*call)(id); });
  }
  // mutex_ held, as for all below.
  void StopInEngine(int choice) {
    if (!id_) return early_stops_.push_back(choice);
    calls_.Post([&engine = engine_, id = *id_, choice] { engine.StopChoice(id, choice); });
  }
  void PauseIfSlow() {
    if (paused_ || queue_.size() < kPauseAtMessages || !id_) return;
    paused_ = true;
    Ask(&Engine::Pause);
  }
  // Ends the call; what is queued is dropped.
  void End(const grpc::Status& status) {
    if (ended_) return;
    queue_.clear();
    last_ = status;
    if (!writing_) Pump();
  }
  // No write is in flight.
  void Pump() {
    if (ended_) return;
    if (paused_ && queue_.empty()) {
      paused_ = false;
      Ask(&Engine::Resume);
    }
    if (!queue_.empty()) {
      current_ = std::move(queue_.front());
      queue_.pop_front();
      writing_ = true;
      StartWrite(&current_);
    } else if (last_) {
      ended_ = true;
      Finish(*last_);
    }
  }

  EngineCalls& calls_;
  Engine& engine_;
  const std::function<void()> on_done_;
  std::mutex mutex_;
  std::optional<GenerateResponseBuilder> builder_;
  std::optional<RequestId> id_;
  std::vector<int> early_stops_;  // choices whose stop string completed before id_ was known
  std::deque<pb::GenerateResponse> queue_;
  pb::GenerateResponse current_;
  std::optional<grpc::Status> last_;
  bool writing_ = false, ended_ = false, engine_done_ = false, paused_ = false, cancelled_ = false;
  std::shared_ptr<GenerateCall> self_;
};

class VllmService final : public pb::VllmEngine::CallbackService {
 public:
  VllmService(const GrpcServerOptions& options, std::shared_ptr<const ServedModel> model, Engine& engine)
      : options_(options),
        keys_(options.api_keys, {}),
        model_(std::move(model)),
        engine_(engine),
        started_(SystemClock().Now()) {}

  void Drain() {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
  }
  EngineCalls& calls() { return calls_; }
  int active() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(running_.size());
  }

  grpc::ServerWriteReactor<pb::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const pb::GenerateRequest* request) override {
    const auto tenant = Authorize(*context);
    const CallKey key{tenant.ok() ? *tenant : "", request->request_id().empty() ? RandomId() : request->request_id()};
    const uint64_t number = NextNumber();
    auto call = std::make_shared<GenerateCall>(calls_, engine_, [this, key, number] { Forget(key, number); });
    call->KeepUntilDone(call);
    const absl::Status begun = tenant.ok() ? Begin(call, *request, key, number) : tenant.status();
    if (!begun.ok()) call->Refuse(begun);
    return call.get();
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context, const pb::AbortRequest* request,
                                  pb::AbortResponse*) override {
    return Answer(context, [&](const std::string& tenant) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const std::string& id : request->request_ids())
        if (const auto it = running_.find({tenant, id}); it != running_.end())
          if (const auto call = it->second.call.lock(); call != nullptr) call->Cancel();
    });
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context, const pb::HealthCheckRequest*,
                                        pb::HealthCheckResponse* reply) override {
    // Anyone may ask: the engine's own words name what only its operator may see.
    const bool healthy = engine_.stats().healthy;
    reply->set_healthy(healthy);
    reply->set_message(healthy ? "ok" : "the engine does not serve; its log says why");
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context, const pb::GetModelInfoRequest*,
                                         pb::GetModelInfoResponse* reply) override {
    return Answer(context, [&](const std::string&) {
      reply->set_model_path(model_->names.front());
      reply->set_served_model_name(model_->names.front());
      reply->set_tokenizer_path(model_->names.front());
      reply->set_is_generation(true);
      reply->set_max_context_length(model_->max_model_len);
      reply->set_max_req_input_len(model_->max_model_len - 1);
      reply->set_vocab_size(model_->vocab_size);
      reply->mutable_eos_token_ids()->Add(model_->end_token_ids.begin(), model_->end_token_ids.end());
    });
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const pb::GetServerInfoRequest*,
                                          pb::GetServerInfoResponse* reply) override {
    return Answer(context, [&](const std::string&) {
      reply->set_active_requests(active());
      reply->set_uptime_seconds(absl::ToDoubleSeconds(SystemClock().Now() - started_));
      reply->set_last_receive_timestamp(last_receive());
      reply->set_server_type("dovetail-grpc");
      reply->set_data_parallel_size(1);
      reply->set_kv_cache_dtype(options_.kv_cache_dtype);
      reply->set_block_size(static_cast<int>(kSegmentTokens));
      reply->set_max_num_seqs(options_.max_num_seqs);
    });
  }

  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* context, const pb::GetLoadsRequest*,
                                     pb::GetLoadsResponse* reply) override {
    return Answer(context, [&](const std::string&) {
      const EngineStats stats = engine_.stats();
      reply->set_timestamp(absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone()));
      reply->set_version(control::kBuildVersion);
      reply->set_dp_rank_count(1);
      pb::SchedulerLoad& load = *reply->add_loads();
      load.set_num_running_reqs(stats.scheduler.running_sequences);
      load.set_num_waiting_reqs(stats.scheduler.waiting_requests);
      load.set_num_total_reqs(stats.scheduler.running_sequences + stats.scheduler.waiting_requests);
      load.set_token_usage(stats.scheduler.kv_usage);
      const uint64_t asked = stats.scheduler.prefix_queries;
      load.set_cache_hit_rate(
          asked == 0 ? 0 : static_cast<double>(stats.scheduler.prefix_hits) / static_cast<double>(asked));
      load.set_max_running_requests(options_.max_num_seqs);
    });
  }

 private:
  using CallKey = std::pair<std::string, std::string>;  // tenant and request id: tenants do not see each other's
  struct Running {
    uint64_t number = 0;
    std::weak_ptr<GenerateCall> call;
  };

  absl::StatusOr<std::string> Authorize(const grpc::CallbackServerContext& context) const {
    RequestHead head;
    const auto found = context.client_metadata().find("authorization");
    if (found != context.client_metadata().end())
      head.headers.emplace_back("authorization", std::string(found->second.data(), found->second.size()));
    auto tenant = keys_.Authorize(head, Scope::kInference);
    if (!tenant)
      return absl::UnauthenticatedError("metadata authorization: Bearer KEY is missing, or the key is not known");
    return *std::move(tenant);
  }

  template <typename Fill>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, Fill fill) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const auto tenant = Authorize(*context);
    if (tenant.ok()) fill(*tenant);
    reactor->Finish(control::ToGrpc(tenant.status()));
    return reactor;
  }

  absl::Status Begin(const std::shared_ptr<GenerateCall>& call, const pb::GenerateRequest& request, const CallKey& key,
                     uint64_t number) {
    RequestContext prepare;
    prepare.tenant = key.first;
    prepare.id = key.second;
    prepare.created = std::time(nullptr);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      prepare.random_seed = random_();
      last_receive_ = static_cast<double>(prepare.created);
      if (draining_) return absl::UnavailableError("the server is draining");
      if (running_.contains(key))
        return absl::AlreadyExistsError(absl::StrCat("request_id: ", key.second, " is running"));
      running_[key] = {number, call};
    }
    DT_ASSIGN_OR_RETURN(PreparedGeneration prepared, PrepareGrpcRequest(request, *model_, prepare));
    call->Begin(*model_, std::move(prepared));
    return absl::OkStatus();
  }
  uint64_t NextNumber() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_number_++;
  }
  // 128 bits, so that no client can guess another's.
  static std::string RandomId() {
    std::random_device device;
    return absl::StrFormat("grpc-%08x%08x%08x%08x", device(), device(), device(), device());
  }
  double last_receive() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_receive_;
  }
  void Forget(const CallKey& key, uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto it = running_.find(key); it != running_.end() && it->second.number == number) running_.erase(it);
  }

  const GrpcServerOptions options_;
  const KeyRing keys_;
  const std::shared_ptr<const ServedModel> model_;
  Engine& engine_;
  const absl::Time started_;
  EngineCalls calls_;
  std::mutex mutex_;
  std::map<CallKey, Running> running_;
  std::mt19937_64 random_{std::random_device{}()};
  uint64_t next_number_ = 1;
  double last_receive_ = 0;
  bool draining_ = false;
};

}  // namespace

class GrpcServer::Impl {
 public:
  Impl(const GrpcServerOptions& options, std::shared_ptr<const ServedModel> model, Engine& engine)
      : service_(options, std::move(model), engine), engine_(engine) {}

  absl::Status Start(const std::string& listen, const TlsOptions& tls) {
    DT_RETURN_IF_ERROR(control::CheckAddress("--grpc-listen", listen, /*may_be_free=*/true));
    control::TameGrpc();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen, MakeListenerCredentials(tls), &port_);
    builder.SetMaxReceiveMessageSize(control::kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) return control::WhyNotListening("--grpc-listen", listen);
    service_.calls().SetPeriodic([this] { PublishHealth(); });
    return absl::OkStatus();
  }

  void Stop(absl::Duration limit) {
    if (server_ == nullptr) return;
    service_.Drain();
    draining_ = true;
    PublishHealth();
    server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit));
    server_->Wait();
    std::lock_guard<std::mutex> lock(health_mutex_);
    server_.reset();
  }
  int port() const { return port_; }

 private:
  void PublishHealth() {
    const bool serving = !draining_ && engine_.stats().healthy;
    std::lock_guard<std::mutex> lock(health_mutex_);
    if (server_ == nullptr) return;
    if (serving == published_ && published_once_) return;
    published_ = serving;
    published_once_ = true;
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    health->SetServingStatus("", serving);
    health->SetServingStatus(kServiceName, serving);
  }

  VllmService service_;
  Engine& engine_;
  std::mutex health_mutex_;
  bool published_ = false, published_once_ = false;
  std::atomic<bool> draining_{false};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

GrpcServer::GrpcServer() = default;
GrpcServer::~GrpcServer() { Stop(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              std::shared_ptr<const ServedModel> model,
                                                              Engine* engine) {
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  server->impl_ = std::make_unique<Impl>(options, std::move(model), *engine);
  DT_RETURN_IF_ERROR(server->impl_->Start(options.listen, options.tls));
  return server;
}

int GrpcServer::port() const { return impl_->port(); }
void GrpcServer::Stop(absl::Duration limit) {
  if (impl_ != nullptr) impl_->Stop(limit);
}

}  // namespace dovetail::server
