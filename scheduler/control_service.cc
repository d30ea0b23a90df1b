#include "scheduler/control_service.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "control/bidi_session.h"
#include "control/convert.h"
#include "control/listening.h"
#include "control/permissions.h"
#include "control/spare_descriptors.h"
#include "control/table_limits.h"
#include "proto/control/dovetail_admin.grpc.pb.h"
#include "proto/control/dovetail_control.grpc.pb.h"

namespace dovetail::scheduler {

namespace pb = control::v1;
using control::Rpc;
using control::ToGrpc;

namespace {

// For a worker: two messages of the largest kind, its configuration, and much more of the others.
constexpr control::QueueLimits kOrderLimits{.messages = 4096, .bytes = size_t{2} * control::kMaxChannelBytes};
// For a server. Texts and log probabilities of seconds; one that does not read for so long is stuck.
constexpr control::QueueLimits kEventLimits{.messages = 65536, .bytes = size_t{64} << 20};

// What the services share.
struct Context {
  const control::Security security;
  control::NodeLoop& loop;
  ClusterScheduler& scheduler;

  // Runs `work` on the loop and finishes the call with what it returns.
  template <typename Work>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* call, Rpc rpc, Work work) {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    if (const absl::Status allowed = control::CheckCaller(security, *call, rpc); !allowed.ok()) {
      reactor->Finish(ToGrpc(allowed));
    } else if (!loop.Post([reactor, work = std::move(work)] { reactor->Finish(ToGrpc(work())); })) {
      reactor->Finish(Stopping());
    }
    return reactor;
  }
  // Whether these roles may speak for that member; one that is not there any more is the scheduler's to refuse. On the
  // loop.
  absl::Status CheckMember(const control::PeerRoles& roles, WorkerId worker, Rpc rpc) const {
    const auto role = scheduler.RoleOf(worker);
    return role ? roles.PermitAs(*role, rpc) : absl::OkStatus();
  }
  static grpc::Status Stopping() { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the scheduler is stopping"); }
};

// Takes a model's files from a worker. Nothing is kept of a stranger's, nor more than the member announced.
class FileReader final : public grpc::ServerReadReactor<pb::ModelFileChunk> {
 public:
  FileReader(Context& context, grpc::CallbackServerContext* call) : context_(context) {
    if (const absl::Status allowed = control::CheckCaller(context.security, *call, Rpc::kPutModelFiles);
        !allowed.ok()) {
      Finish(ToGrpc(allowed));
    } else {
      StartRead(&chunk_);
    }
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Deliver();
    if (announced_) return TakeAndGoOn();
    worker_ = WorkerId(chunk_.worker());
    epoch_ = Epoch(chunk_.epoch());
    const bool posted = context_.loop.Post([this] {
      const auto announced = context_.scheduler.AnnouncedFileBytes(worker_, epoch_);
      if (!announced.ok()) return Finish(ToGrpc(announced.status()));
      announced_ = *announced;
      TakeAndGoOn();
    });
    if (!posted) Finish(Context::Stopping());
  }
  void OnDone() override { delete this; }

 private:
  void TakeAndGoOn() {
    if (const absl::Status taken = Take(); !taken.ok()) return Finish(ToGrpc(taken));
    StartRead(&chunk_);
  }
  absl::Status Take() {
    if (WorkerId(chunk_.worker()) != worker_ || Epoch(chunk_.epoch()) != epoch_)
      return InvalidArgument("model files: one stream carries one worker's");
    total_ += chunk_.data().size();
    if (chunk_.file() >= static_cast<uint32_t>(control::kMaxModelFiles) || total_ > *announced_)
      return InvalidArgument("model files: more than ", control::kMaxModelFiles, " or than the ", *announced_,
                             " bytes that were announced");
    if (files_.size() <= chunk_.file()) files_.resize(chunk_.file() + 1);
    files_[chunk_.file()] += chunk_.data();
    return absl::OkStatus();
  }
  void Deliver() {
    const bool posted = context_.loop.Post(
        [this] { Finish(ToGrpc(context_.scheduler.PutModelFiles(worker_, epoch_, std::move(files_)))); });
    if (!posted) Finish(Context::Stopping());
  }

  Context& context_;
  pb::ModelFileChunk chunk_;
  WorkerId worker_;
  Epoch epoch_;
  std::optional<uint64_t> announced_;  // bytes, by a member
  uint64_t total_ = 0;
  std::vector<std::string> files_;
};

// Gives a model's files to a server.
class FileWriter final : public grpc::ServerWriteReactor<pb::ModelFileChunk> {
 public:
  FileWriter(Context& context, grpc::CallbackServerContext* call, uint64_t digest) {
    if (const absl::Status allowed = control::CheckCaller(context.security, *call, Rpc::kGetModelFiles);
        !allowed.ok()) {
      Finish(ToGrpc(allowed));
      return;
    }
    const bool posted = context.loop.Post([this, &context, digest] {
      auto files = context.scheduler.ModelFiles(digest);
      if (!files.ok()) return Finish(ToGrpc(files.status()));
      files_ = *std::move(files);
      WriteNext();
    });
    if (!posted) Finish(Context::Stopping());
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the peer is gone"));
    WriteNext();
  }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    while (file_ < files_->size() && at_ >= (*files_)[file_].bytes.size()) {
      ++file_;
      at_ = 0;
    }
    if (file_ == files_->size()) return Finish(grpc::Status::OK);
    chunk_.set_file(static_cast<uint32_t>(file_));
    chunk_.set_data((*files_)[file_].bytes.substr(at_, control::kFileChunkBytes));
    at_ += control::kFileChunkBytes;
    StartWrite(&chunk_);
  }

  std::shared_ptr<const std::vector<control::TextFile>> files_;
  size_t file_ = 0, at_ = 0;
  pb::ModelFileChunk chunk_;
};

class MembershipService final : public pb::Membership::CallbackService {
 public:
  explicit MembershipService(Context& context) : context_(context) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* call, const pb::JoinRequest* request,
                                 pb::JoinReply* reply) override {
    const control::PeerRoles roles = control::RolesOf(context_.security, *call);
    return context_.Answer(call, Rpc::kJoin, [this, request, reply, roles]() -> absl::Status {
      const bool computes = request->role() == pb::ROLE_COMPUTE_WORKER;
      DT_RETURN_IF_ERROR(
          roles.PermitAs(computes ? control::Role::kComputeWorker : control::Role::kAttentionWorker, Rpc::kJoin));
      DT_ASSIGN_OR_RETURN(const control::JoinRequest parsed, control::FromProto(*request));
      DT_ASSIGN_OR_RETURN(const control::JoinReply joined, context_.scheduler.Join(parsed));
      control::ToProto(joined, *reply);
      return absl::OkStatus();
    });
  }

  grpc::ServerReadReactor<pb::ModelFileChunk>* PutModelFiles(grpc::CallbackServerContext* call,
                                                             pb::PutModelFilesReply*) override {
    return new FileReader(context_, call);
  }

  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* call, const pb::LeaveRequest* request,
                                  pb::LeaveReply*) override {
    const control::PeerRoles roles = control::RolesOf(context_.security, *call);
    return context_.Answer(call, Rpc::kLeave, [this, request, roles]() -> absl::Status {
      DT_RETURN_IF_ERROR(context_.CheckMember(roles, WorkerId(request->worker()), Rpc::kLeave));
      context_.scheduler.Leave(WorkerId(request->worker()), Epoch(request->epoch()));
      return absl::OkStatus();
    });
  }

  grpc::ServerBidiReactor<pb::WorkerReport, pb::SchedulerOrder>* Attend(grpc::CallbackServerContext* call) override {
    using Session = control::BidiSession<pb::WorkerReport, pb::SchedulerOrder>;
    const auto session = Session::Start(call, kOrderLimits);
    // The worker that speaks, from the first report on. Touched by one gRPC callback at a time.
    const auto who = std::make_shared<std::pair<WorkerId, Epoch>>();
    const auto known = std::make_shared<bool>(false);
    // Whether it may speak for that member: a stream that was refused says and ends nothing. Touched on the loop only.
    const auto begun = std::make_shared<bool>(false);
    typename Session::Handlers handlers;
    const std::weak_ptr<Session> weak = session;
    const control::PeerRoles roles = control::RolesOf(context_.security, *call);
    handlers.on_message = [this, weak, who, known, begun, roles](const pb::WorkerReport& report) {
      const auto open = weak.lock();
      if (open == nullptr) return;
      const std::pair<WorkerId, Epoch> speaker(WorkerId(report.worker()), Epoch(report.epoch()));
      if (!*known) {
        *who = speaker;
        *known = true;
        return Begin(open, speaker, roles, begun);
      }
      if (speaker != *who)
        return open->Close(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "one stream carries one worker's reports"));
      if (const absl::Status taken = Take(speaker.first, report, begun); !taken.ok()) open->Close(ToGrpc(taken));
    };
    handlers.on_closed = [this, who, known, begun] {
      if (!*known) return;
      context_.loop.Post([this, speaker = *who, begun] {
        if (*begun) context_.scheduler.OnStreamEnded(speaker.first, speaker.second);
      });
    };
    if (const absl::Status allowed = control::CheckCaller(context_.security, *call, Rpc::kAttend); !allowed.ok())
      session->Close(ToGrpc(allowed));
    session->Begin(std::move(handlers));
    return session.get();
  }

 private:
  template <typename Session>
  void Begin(const std::shared_ptr<Session>& session, std::pair<WorkerId, Epoch> speaker,
             const control::PeerRoles& roles, const std::shared_ptr<bool>& begun) {
    const bool posted = context_.loop.Post([this, session, speaker, roles, begun] {
      if (const absl::Status allowed = context_.CheckMember(roles, speaker.first, Rpc::kAttend); !allowed.ok())
        return session->Close(ToGrpc(allowed));
      WorkerStream stream{[session](pb::SchedulerOrder order) { session->Send(std::move(order)); },
                          [session](const absl::Status& status) { session->Close(ToGrpc(status)); }};
      const absl::Status attends = context_.scheduler.Attend(speaker.first, speaker.second, std::move(stream));
      *begun = attends.ok();
      if (!attends.ok()) session->Close(ToGrpc(attends));
    });
    if (!posted) session->Close(Context::Stopping());
  }

  absl::Status Take(WorkerId worker, const pb::WorkerReport& report, const std::shared_ptr<bool>& begun) {
    std::function<void()> work;
    if (report.has_heartbeat()) {
      DT_ASSIGN_OR_RETURN(control::Heartbeat heartbeat, control::FromProto(report.heartbeat()));
      work = [this, worker, heartbeat = std::move(heartbeat)] { context_.scheduler.OnHeartbeat(worker, heartbeat); };
    } else if (report.has_ready()) {
      const control::Ready ready = control::FromProto(report.ready());
      work = [this, worker, ready] { context_.scheduler.OnReady(worker, ready); };
    } else if (report.has_applied()) {
      DT_ASSIGN_OR_RETURN(control::Applied applied, control::FromProto(report.applied()));
      work = [this, worker, applied = std::move(applied)] { context_.scheduler.OnApplied(worker, applied); };
    } else if (report.has_link_failed()) {
      DT_ASSIGN_OR_RETURN(control::LinkFailed failed, control::FromProto(report.link_failed()));
      work = [this, worker, failed = std::move(failed)] { context_.scheduler.OnLinkFailed(worker, failed); };
    } else {
      return InvalidArgument("report: says nothing that is known");
    }
    const bool posted = context_.loop.Post([work = std::move(work), begun] {
      if (*begun) work();
    });
    return posted ? absl::OkStatus() : absl::UnavailableError("the scheduler is stopping");
  }

  Context& context_;
};

class GenerationService final : public pb::Generation::CallbackService {
 public:
  explicit GenerationService(Context& context) : context_(context) {}

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* call, const pb::GetModelRequest*,
                                     pb::GetModelReply* reply) override {
    return context_.Answer(call, Rpc::kGetModel, [this, reply] { return context_.scheduler.GetModel(*reply); });
  }

  grpc::ServerWriteReactor<pb::ModelFileChunk>* GetModelFiles(grpc::CallbackServerContext* call,
                                                              const pb::GetModelFilesRequest* request) override {
    return new FileWriter(context_, call, request->digest());
  }

  grpc::ServerBidiReactor<pb::GenerationCommands, pb::GenerationEvents>* Open(
      grpc::CallbackServerContext* call) override {
    using Session = control::BidiSession<pb::GenerationCommands, pb::GenerationEvents>;
    const auto session = Session::Start(call, kEventLimits);
    const auto server = std::make_shared<uint64_t>(0);  // touched on the loop only
    typename Session::Handlers handlers;
    handlers.on_message = [this, server](const pb::GenerationCommands& commands) {
      context_.loop.Post([this, server, commands] { context_.scheduler.OnCommands(*server, commands); });
    };
    handlers.on_closed = [this, server] {
      context_.loop.Post([this, server] { context_.scheduler.RemoveServer(*server); });
    };
    const absl::Status allowed = control::CheckCaller(context_.security, *call, Rpc::kOpen);
    const bool posted = allowed.ok() && context_.loop.Post([this, session, server] {
      const auto added =
          context_.scheduler.AddServer([session](pb::GenerationEvents events) { session->Send(std::move(events)); });
      if (!added.ok()) return session->Close(ToGrpc(added.status()));
      *server = *added;
    });
    if (!allowed.ok()) session->Close(ToGrpc(allowed));
    if (allowed.ok() && !posted) session->Close(Context::Stopping());
    session->Begin(std::move(handlers));
    return session.get();
  }

 private:
  Context& context_;
};

class AdminService final : public admin::v1::Admin::CallbackService {
 public:
  explicit AdminService(Context& context) : context_(context) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* call, const admin::v1::GetStatusRequest*,
                                      admin::v1::ClusterStatus* reply) override {
    return context_.Answer(call, Rpc::kGetStatus, [this, reply] {
      context_.scheduler.Describe(*reply);
      return absl::OkStatus();
    });
  }
  grpc::ServerUnaryReactor* ListWorkers(grpc::CallbackServerContext* call, const admin::v1::ListWorkersRequest*,
                                        admin::v1::ListWorkersReply* reply) override {
    return context_.Answer(call, Rpc::kListWorkers, [this, reply] {
      admin::v1::ClusterStatus status;
      context_.scheduler.Describe(status);
      reply->mutable_workers()->Swap(status.mutable_workers());
      return absl::OkStatus();
    });
  }
  grpc::ServerUnaryReactor* DrainWorker(grpc::CallbackServerContext* call, const admin::v1::DrainWorkerRequest* request,
                                        admin::v1::DrainWorkerReply*) override {
    return context_.Answer(call, Rpc::kDrainWorker, [this, request]() -> absl::Status {
      if (request->who_case() == admin::v1::DrainWorkerRequest::kWorker)
        return context_.scheduler.Drain(WorkerId(request->worker()), request->alone());
      return context_.scheduler.Drain(request->name(), request->alone());
    });
  }

 private:
  Context& context_;
};

}  // namespace

class ControlService::Impl {
 public:
  Impl(const control::Security& security, control::NodeLoop& loop, ClusterScheduler& scheduler)
      : context_{security, loop, scheduler}, membership_(context_), generation_(context_), admin_(context_) {}

  absl::Status Start(const std::string& listen, int& port) {
    control::TameGrpc();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen, control::MakeServerCredentials(context_.security), &port);
    control::BoundConnections(builder);
    builder.SetMaxReceiveMessageSize(control::kMaxChannelBytes);
    builder.SetMaxSendMessageSize(control::kMaxChannelBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // else two schedulers would share a port
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.RegisterService(&membership_);
    builder.RegisterService(&generation_);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      server_.reset();
      return control::WhyNotListening("--listen", listen);
    }
    return absl::OkStatus();
  }

  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
    server_->Wait();
    server_.reset();
  }

 private:
  Context context_;
  MembershipService membership_;
  GenerationService generation_;
  AdminService admin_;
  std::unique_ptr<grpc::Server> server_;
};

ControlService::ControlService() = default;
ControlService::~ControlService() { Stop(); }

absl::StatusOr<std::unique_ptr<ControlService>> ControlService::Start(const std::string& listen,
                                                                      const control::Security& security,
                                                                      control::NodeLoop& loop,
                                                                      ClusterScheduler& scheduler) {
  DT_RETURN_IF_ERROR(control::CheckAddress("--listen", listen, /*may_be_free=*/true));
  DT_RETURN_IF_ERROR(security.Validate());
  std::unique_ptr<ControlService> service(new ControlService());
  service->impl_ = std::make_unique<Impl>(security, loop, scheduler);
  DT_RETURN_IF_ERROR(service->impl_->Start(listen, service->port_));
  return service;
}

void ControlService::Stop() {
  if (impl_ != nullptr) impl_->Stop();
}

}  // namespace dovetail::scheduler
