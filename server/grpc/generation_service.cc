#include "server/grpc/generation_service.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "control/listening.h"
#include "control/messages.h"
#include "control/security.h"
#include "control/spare_descriptors.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/credentials.h"
#include "server/grpc/embed_call.h"
#include "server/grpc/engine_calls.h"
#include "server/grpc/generate_call.h"
#include "server/grpc/generate_request.h"
#include "server/grpc/kv_event_hub.h"
#include "server/http/key_ring.h"

namespace dovetail::server {

namespace pb = vllm::grpc::engine;

namespace {

constexpr const char* kServiceName = "vllm.grpc.engine.VllmEngine";

class VllmService final : public pb::VllmEngine::CallbackService {
 public:
  VllmService(const GrpcServerOptions& options, std::shared_ptr<const ServedModel> model, engine::Engine& engine,
              std::shared_ptr<Intake> intake, std::shared_ptr<ServerMetrics> metrics)
      : options_(options),
        keys_(options.api_keys, {}),
        model_(std::move(model)),
        engine_(engine),
        intake_(std::move(intake)),
        metrics_(std::move(metrics)),
        kv_events_(std::make_shared<KvEventHub>(intake_->cache_epochs,
                                                [this](std::function<void()> work) { calls_.Post(std::move(work)); })),
        started_(SystemClock().Now()) {
    engine_.WatchCache(kv_events_);
  }
  ~VllmService() override { kv_events_->Close(); }

  void Drain() {
    kv_events_->Close();
    const MutexLock lock(mutex_);
    draining_ = true;
  }
  // After gRPC ended all calls: the threads of the queue use nothing of this object any more.
  void WaitForReaders() {
    MutexLock lock(mutex_);
    none_reading_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return reading_ == 0; });
  }
  EngineCalls& calls() { return calls_; }
  int active() {
    const MutexLock lock(mutex_);
    return static_cast<int>(running_.size());
  }

  grpc::ServerWriteReactor<pb::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const pb::GenerateRequest* request) override {
    const Started started = Begun(*context, "Generate", request->request_id());
    auto call = std::make_shared<GenerateCall>(server_, started.info, started.on_end);
    call->KeepUntilDone(call);
    return Run(*call, call, *context, request, started);
  }

  grpc::ServerUnaryReactor* Embed(grpc::CallbackServerContext* context, const pb::EmbedRequest* request,
                                  pb::EmbedResponse* reply) override {
    const Started started = Begun(*context, "Embed", request->request_id());
    auto call = std::make_shared<EmbedCall>(server_, started.info, reply, started.on_end);
    call->KeepUntilDone(call);
    return Run(*call, call, *context, request, started);
  }

  // Nothing waits for it: requests that run keep their KV, and those that come find nothing of the earlier ones.
  grpc::ServerUnaryReactor* FlushCache(grpc::CallbackServerContext* context, const pb::FlushCacheRequest*,
                                       pb::FlushCacheResponse* reply) override {
    return Answer(context, "FlushCache", [&](const std::string& tenant) {
      intake_->cache_epochs.Advance(tenant);
      kv_events_->Flushed(tenant);
      reply->set_success(true);
      reply->set_message("later requests begin with an empty prefix cache");
    });
  }
  grpc::ServerUnaryReactor* StartProfile(grpc::CallbackServerContext* context, const pb::NotServed*,
                                         pb::NotServed*) override {
    return Unserved(context, "StartProfile", kNoProfiler);
  }
  grpc::ServerUnaryReactor* StopProfile(grpc::CallbackServerContext* context, const pb::NotServed*,
                                        pb::NotServed*) override {
    return Unserved(context, "StopProfile", kNoProfiler);
  }
  grpc::ServerWriteReactor<pb::GetTokenizerChunk>* GetTokenizer(grpc::CallbackServerContext* context,
                                                                const pb::GetTokenizerRequest*) override {
    absl::Status status = Authorize(*context).status();
    if (status.ok() && options_.tokenizer == nullptr) status = absl::FailedPreconditionError(options_.why_no_tokenizer);
    return new TokenizerCall(status.ok() ? options_.tokenizer : nullptr, control::ToGrpc(status),
                             [metrics = metrics_](const grpc::Status& end) {
                               metrics->GrpcResponse("GetTokenizer",
                                                     absl::StatusCodeToString(absl::StatusCode(end.error_code())));
                             });
  }
  grpc::ServerWriteReactor<pb::KvEventBatch>* SubscribeKvEvents(grpc::CallbackServerContext* context,
                                                                const pb::SubscribeKvEventsRequest* request) override {
    const auto call = std::make_shared<KvEventsCall>([metrics = metrics_](const grpc::Status& end) {
      metrics->GrpcResponse("SubscribeKvEvents", absl::StatusCodeToString(absl::StatusCode(end.error_code())));
    });
    call->KeepUntilDone(call);
    const auto tenant = Authorize(*context);
    const absl::Status status =
        tenant.ok() ? kv_events_->Subscribe(*tenant, request->start_sequence_number(), call) : tenant.status();
    if (!status.ok()) call->End(control::ToGrpc(status));
    return call.get();
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context, const pb::AbortRequest* request,
                                  pb::AbortResponse*) override {
    return Answer(context, "Abort", [&](const std::string& tenant) {
      for (const std::string& id : request->request_ids())
        if (const auto call = Find({tenant, id}); call != nullptr) call->Cancel();
    });
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context, const pb::HealthCheckRequest*,
                                        pb::HealthCheckResponse* reply) override {
    // Anyone may ask: the engine's own words name what only its operator may see.
    const bool healthy = engine_.stats().healthy;
    reply->set_healthy(healthy);
    metrics_->GrpcResponse("HealthCheck", "OK");
    reply->set_message(healthy ? "ok" : "the engine does not serve; its log says why");
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context, const pb::GetModelInfoRequest*,
                                         pb::GetModelInfoResponse* reply) override {
    return Answer(context, "GetModelInfo", [&](const std::string&) {
      reply->set_model_path(model_->names.front());
      reply->set_served_model_name(model_->names.front());
      reply->set_tokenizer_path(model_->names.front());
      reply->set_is_generation(true);
      const int64_t usable = model_->UsableLength(engine_.stats().scheduler.longest_sequence);
      reply->set_max_context_length(static_cast<int32_t>(usable));
      reply->set_max_req_input_len(static_cast<int32_t>(usable - 1));
      reply->set_vocab_size(model_->vocab_size);
      reply->mutable_eos_token_ids()->Add(model_->end_token_ids.begin(), model_->end_token_ids.end());
    });
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const pb::GetServerInfoRequest*,
                                          pb::GetServerInfoResponse* reply) override {
    return Answer(context, "GetServerInfo", [&](const std::string&) {
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
    return Answer(context, "GetLoads", [&](const std::string&) {
      const engine::EngineStats stats = engine_.stats();
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
      load.set_num_waiting_uncached_tokens(static_cast<int32_t>(std::min<int64_t>(waiting_tokens_, INT32_MAX)));
    });
  }

 private:
  using CallKey = std::pair<std::string, std::string>;  // tenant and request id: tenants do not see each other's
  struct Running {
    uint64_t number = 0;
    std::weak_ptr<EngineCall> call;
  };

  // What a call begins with.
  struct Started {
    absl::StatusOr<std::string> tenant;
    CallKey key;
    uint64_t number = 0;
    CallInfo info;
    std::function<void()> on_end;
  };

  static constexpr const char* kNoProfiler = "there is no profiler; --otlp-traces-endpoint gives traces";

  grpc::ServerUnaryReactor* Unserved(grpc::CallbackServerContext* context, const char* method, const char* why) {
    metrics_->GrpcResponse(method, "UNIMPLEMENTED");
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, absl::StrCat(method, " is not served: ", why)));
    return reactor;
  }

  Started Begun(const grpc::CallbackServerContext& context, const char* method, const std::string& request_id) {
    Started started{Authorize(context), {}, NextNumber(), {}, {}};
    started.key = {started.tenant.ok() ? *started.tenant : "", request_id.empty() ? RandomId() : request_id};
    started.info = {started.key.second, started.key.first, absl::StrCat("/", kServiceName, "/", method),
                    SystemClock().Now(), BeginTrace(options_.traces, TraceparentOf(context))};
    started.on_end = [this, key = started.key, number = started.number] { Forget(key, number); };
    return started;
  }

  // The reactor again, once the call waits to be read or is refused.
  template <typename Call, typename Request>
  Call* Run(Call& reactor, const std::shared_ptr<EngineCall>& call, const grpc::CallbackServerContext& context,
            const Request* request, const Started& started) {
    if (options_.request_timeout > absl::ZeroDuration()) call->LimitTime(options_.request_timeout);
    const absl::Status admitted =
        started.tenant.ok() ? Admit(call, started.key, started.number) : started.tenant.status();
    // gRPC keeps its request, which is not const, until the call has ended: what is in it goes with the reading.
    Request taken;
    taken.Swap(const_cast<Request*>(request));
    if (admitted.ok())
      Read(call, context, std::move(taken), started.key);
    else
      call->Refuse(admitted);
    return &reactor;
  }

  // A call in the queue. However its task ends, the call is told: one that is dropped was cancelled, or the server
  // stops. Of one thread at a time.
  template <typename Request>
  class Reading {
   public:
    Reading(VllmService& service, std::shared_ptr<EngineCall> call, Request request)
        : service_(service), call_(std::move(call)), request_(std::move(request)) {
      const MutexLock lock(service_.mutex_);
      ++service_.reading_;
    }
    ~Reading() {
      if (call_ != nullptr)
        Refuse(call_->cancel()->cancelled() ? absl::CancelledError("the request was aborted")
                                            : absl::UnavailableError("the server is shutting down"));
      const MutexLock lock(service_.mutex_);
      if (--service_.reading_ == 0) service_.none_reading_.notify_all();
    }
    // False: it wants a grammar that has to be compiled, which `prepare` says is not for this thread.
    bool Run(const grpc::CallbackServerContext& context, RequestContext prepare) {
      prepare.cancel = call_->cancel().get();
      if (call_->cancel()->cancelled()) return true;
      if (context.deadline() <= std::chrono::system_clock::now()) {
        Refuse(absl::DeadlineExceededError("the request's deadline passed while it waited to be read"));
        return true;
      }
      auto prepared = PrepareGrpcRequest(request_, *service_.model_, prepare);
      if (NeedsCompiling(prepared.status())) return false;
      if (prepared.ok())
        std::exchange(call_, nullptr)->Begin(*service_.model_, *std::move(prepared));
      else
        Refuse(prepared.status());
      return true;
    }
    void Refuse(const absl::Status& status) { std::exchange(call_, nullptr)->Refuse(status); }

   private:
    VllmService& service_;
    std::shared_ptr<EngineCall> call_;
    const Request request_;
  };

  static std::optional<std::string_view> TraceparentOf(const grpc::CallbackServerContext& context) {
    const auto found = context.client_metadata().find("traceparent");
    if (found == context.client_metadata().end()) return std::nullopt;
    return std::string_view(found->second.data(), found->second.size());
  }

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
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const char* method, Fill fill) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const auto tenant = Authorize(*context);
    if (tenant.ok()) fill(*tenant);
    metrics_->GrpcResponse(method, absl::StatusCodeToString(tenant.status().code()));
    reactor->Finish(control::ToGrpc(tenant.status()));
    return reactor;
  }

  // As over HTTP, what certainly cannot run is refused before it is read.
  absl::Status Admit(const std::shared_ptr<EngineCall>& call, const CallKey& key, uint64_t number) {
    const engine::EngineStats stats = engine_.stats();
    if (!stats.healthy) return absl::UnavailableError("the engine does not serve; its log says why");
    DT_RETURN_IF_ERROR(intake_->admission.Check(key.first, stats));
    const MutexLock lock(mutex_);
    last_receive_ = static_cast<double>(std::time(nullptr));
    if (draining_) return absl::UnavailableError("the server is draining");
    if (running_.contains(key))
      return absl::AlreadyExistsError(absl::StrCat("request_id: ", key.second, " is running"));
    running_[key] = {number, call};
    return absl::OkStatus();
  }
  // gRPC keeps the context until the call has ended, which the reading does.
  template <typename Request>
  void Read(const std::shared_ptr<EngineCall>& call, const grpc::CallbackServerContext& context, Request request,
            const CallKey& key) {
    RequestContext prepare;
    prepare.tenant = key.first;
    prepare.id = key.second;
    prepare.created = std::time(nullptr);
    prepare.random_seed = RandomSeed();
    prepare.cache_epoch = intake_->cache_epochs.Of(key.first);
    // A message of many short parts takes far more memory than it had bytes.
    const size_t bytes = request.SpaceUsedLong();
    const auto reading = std::make_shared<Reading<Request>>(*this, call, std::move(request));
    const auto compile = [reading, &context, prepare] { reading->Run(context, prepare); };
    prepare.may_compile = false;
    const auto read = [this, reading, &context, prepare, compile, tenant = key.first, bytes, cancel = call->cancel()] {
      if (reading->Run(context, prepare)) return;
      const absl::Status posted = intake_->grammars.TryPost({tenant, bytes, cancel, compile});
      if (!posted.ok()) reading->Refuse(posted);
    };
    const absl::Status posted = intake_->queue.TryPost({key.first, bytes, call->cancel(), read});
    if (!posted.ok()) reading->Refuse(posted);
  }
  std::shared_ptr<EngineCall> Find(const CallKey& key) {
    const MutexLock lock(mutex_);
    const auto it = running_.find(key);
    return it == running_.end() ? nullptr : it->second.call.lock();
  }
  uint64_t RandomSeed() {
    const MutexLock lock(mutex_);
    return random_();
  }
  uint64_t NextNumber() {
    const MutexLock lock(mutex_);
    return next_number_++;
  }
  // 128 bits, so that no client can guess another's.
  static std::string RandomId() {
    std::random_device device;
    return absl::StrFormat("grpc-%08x%08x%08x%08x", device(), device(), device(), device());
  }
  double last_receive() {
    const MutexLock lock(mutex_);
    return last_receive_;
  }
  void Forget(const CallKey& key, uint64_t number) {
    const MutexLock lock(mutex_);
    if (const auto it = running_.find(key); it != running_.end() && it->second.number == number) running_.erase(it);
  }

  const GrpcServerOptions options_;
  const KeyRing keys_;
  const std::shared_ptr<const ServedModel> model_;
  engine::Engine& engine_;
  const std::shared_ptr<Intake> intake_;
  const std::shared_ptr<ServerMetrics> metrics_;
  const std::shared_ptr<KvEventHub> kv_events_;
  const absl::Time started_;
  EngineCalls calls_;
  WaitingTokens waiting_tokens_{0};
  const EngineCall::Server server_{engine_, calls_, *intake_, *metrics_, options_.log, waiting_tokens_};
  Mutex mutex_;
  CondVar none_reading_;
  int reading_ ABSL_GUARDED_BY(mutex_) = 0;  // calls whose tasks have not ended
  std::map<CallKey, Running> running_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_){std::random_device{}()};
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  double last_receive_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

class GrpcServer::Impl {
 public:
  Impl(const GrpcServerOptions& options, std::shared_ptr<const ServedModel> model, engine::Engine& engine,
       std::shared_ptr<Intake> intake, std::shared_ptr<ServerMetrics> metrics)
      : service_(options, std::move(model), engine, std::move(intake), std::move(metrics)), engine_(engine) {}

  absl::Status Start(const GrpcServerOptions& options) {
    const std::string& listen = options.listen;
    DT_RETURN_IF_ERROR(control::CheckAddress("--grpc-listen", listen, /*may_be_free=*/true));
    control::TameGrpc();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen, MakeListenerCredentials(options.tls), &port_);
    control::BoundConnections(builder);
    builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
    grpc::ResourceQuota quota("dovetail-grpc");
    quota.Resize(options.max_unread_bytes);
    builder.SetResourceQuota(quota);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) return control::WhyNotListening("--grpc-listen", listen);
    {
      const MutexLock lock(health_mutex_);
      health_ = server_->GetHealthCheckService();
    }
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
    service_.WaitForReaders();
    {
      const MutexLock lock(health_mutex_);
      health_ = nullptr;
    }
    server_.reset();
  }
  int port() const { return port_; }

 private:
  void PublishHealth() {
    const bool serving = !draining_ && engine_.stats().healthy;
    const MutexLock lock(health_mutex_);
    if (health_ == nullptr) return;
    if (serving == published_ && published_once_) return;
    published_ = serving;
    published_once_ = true;
    health_->SetServingStatus("", serving);
    health_->SetServingStatus(kServiceName, serving);
  }

  VllmService service_;
  engine::Engine& engine_;
  Mutex health_mutex_;
  grpc::HealthCheckServiceInterface* health_ ABSL_GUARDED_BY(health_mutex_) = nullptr;  // server_'s; null without one
  bool published_ ABSL_GUARDED_BY(health_mutex_) = false;
  bool published_once_ ABSL_GUARDED_BY(health_mutex_) = false;
  std::atomic<bool> draining_{false};
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;  // of the thread that calls Start and Stop
};

absl::Status GrpcServerOptions::Validate() const {
  if (max_unread_bytes >= 4 * max_message_bytes && max_unread_bytes <= size_t{1} << 40) return absl::OkStatus();
  return InvalidArgument("--max-unread-grpc-bytes: ", max_unread_bytes, " is less than four times the ",
                         max_message_bytes, " of --max-body-bytes, or more than 1 TiB");
}

GrpcServer::GrpcServer() = default;
GrpcServer::~GrpcServer() { Stop(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              std::shared_ptr<const ServedModel> model,
                                                              engine::Engine* engine, std::shared_ptr<Intake> intake,
                                                              std::shared_ptr<ServerMetrics> metrics) {
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  server->impl_ = std::make_unique<Impl>(options, std::move(model), *engine, std::move(intake), std::move(metrics));
  DT_RETURN_IF_ERROR(server->impl_->Start(options));
  return server;
}

int GrpcServer::port() const { return impl_->port(); }
void GrpcServer::Stop(absl::Duration limit) {
  if (impl_ != nullptr) impl_->Stop(limit);
}

}  // namespace dovetail::server
