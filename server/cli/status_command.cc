#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "proto/control/dovetail_admin.grpc.pb.h"
#include "server/cli/cluster_commands.h"

namespace dovetail::cli {

namespace pb = admin::v1;

namespace {

constexpr absl::Duration kWatchPause = absl::Milliseconds(50);

struct AdminCall {
  control::Security security;
  std::unique_ptr<pb::Admin::Stub> stub;
  grpc::ClientContext context;
};

absl::Status Prepare(const ControlFlags& flags, AdminCall& call) {
  DT_ASSIGN_OR_RETURN(call.security, SecurityOf(flags));
  DT_ASSIGN_OR_RETURN(const auto channel, control::MakeChannel("--scheduler", flags.scheduler, call.security));
  call.stub = pb::Admin::NewStub(channel);
  control::AddToken(call.security, call.context);
  call.context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  return absl::OkStatus();
}

void Print(const pb::Worker& worker) {
  std::printf("%6u  %-24s %-9s %-10s %5u %7.1f", worker.worker(), worker.name().c_str(), worker.role().c_str(),
              worker.state().c_str(), worker.cores(), static_cast<double>(worker.memory_bytes_per_s()) / 1e9);
  if (worker.kv_blocks() > 0) {
    std::printf(" %9.1f %5.1f%%", static_cast<double>(worker.kv_bytes()) / (1 << 20),
                100.0 * static_cast<double>(worker.kv_blocks_in_use()) / static_cast<double>(worker.kv_blocks()));
  } else {
    std::printf(" %9s %6s", "-", "-");
  }
  std::printf(" %9llu %8.0f s\n", static_cast<unsigned long long>(worker.steps()), worker.joined_seconds_ago());
}

void Print(const pb::ClusterStatus& status) {
  const std::string kv = status.kv_cache_dtype().empty() ? "" : ", K and V in " + status.kv_cache_dtype();
  std::printf("model %s%s, %s; dovetail %s, %s, up %.0f s\n",
              status.model().empty() ? "(none yet)" : status.model().c_str(), kv.c_str(),
              status.serving() ? "serving" : status.why_not().c_str(), status.version().c_str(),
              status.data_plane_version().c_str(), status.uptime_seconds());
  std::printf("%u server(s), %u sequences running, %u requests waiting, %llu tokens in %llu steps\n", status.servers(),
              status.running_sequences(), status.waiting_requests(),
              static_cast<unsigned long long>(status.generation_tokens()),
              static_cast<unsigned long long>(status.steps()));
  if (status.longest_sequence() > 0 && status.longest_sequence() < status.max_model_len()) {
    std::printf(
        "sequences of up to %llu tokens: the KV caches hold no longer one; by --max-model-len and the model %llu\n\n",
        static_cast<unsigned long long>(status.longest_sequence()),
        static_cast<unsigned long long>(status.max_model_len()));
  } else if (status.max_model_len() > 0) {
    std::printf("sequences of up to %llu tokens\n\n", static_cast<unsigned long long>(status.max_model_len()));
  }
  if (!status.last_prefill().empty()) std::printf("last part of a prompt: %s\n\n", status.last_prefill().c_str());
  std::printf("worker  %-24s %-9s %-10s %5s %7s %9s %6s %9s %10s\n", "name", "role", "state", "cores", "GB/s", "KV MiB",
              "used", "steps", "joined ago");
  for (const pb::Worker& worker : status.workers()) Print(worker);
  for (const pb::Worker& worker : status.workers())
    for (const std::string& peer : worker.unconnected())
      std::printf("%s has no connection with %s yet\n", worker.name().c_str(), peer.c_str());
  for (const pb::Worker& worker : status.workers())
    if (worker.damaged_steps() > 0)
      std::printf("%s refused %llu steps since it joined: KV was not what was written\n", worker.name().c_str(),
                  static_cast<unsigned long long>(worker.damaged_steps()));
  std::printf("\nlanes, and the bytes of tensors and of messages sent over them\n");
  for (const pb::Worker& worker : status.workers())
    for (const pb::Link& link : worker.links())
      std::printf("  %-24s -> %-24s %-16s %14llu %12llu\n", worker.name().c_str(), link.peer().c_str(),
                  link.lanes().c_str(), static_cast<unsigned long long>(link.tensor_bytes()),
                  static_cast<unsigned long long>(link.message_bytes()));
  bool told = false;
  for (const pb::Worker& worker : status.workers()) {
    for (const pb::Link& link : worker.links()) {
      if (link.exchange().empty()) continue;
      if (!std::exchange(told, true))
        std::printf(
            "\nhow layers cross, and what compute workers give each other: by the GPUs themselves (device) or the "
            "hosts\n");
      std::printf("  %-24s -- %-24s %s\n", worker.name().c_str(), link.peer().c_str(), link.exchange().c_str());
    }
  }
}

absl::StatusOr<pb::ClusterStatus> AskStatus(const ControlFlags& flags) {
  AdminCall call;
  DT_RETURN_IF_ERROR(Prepare(flags, call));
  pb::ClusterStatus status;
  const grpc::Status done = call.stub->GetStatus(&call.context, pb::GetStatusRequest(), &status);
  if (!done.ok()) return control::ExplainCallFailure("scheduler", flags.scheduler, call.security, done);
  return status;
}

const pb::Worker* FindWorker(const pb::ClusterStatus& status, const std::string& name) {
  for (const pb::Worker& worker : status.workers())
    if (worker.name() == name) return &worker;
  return nullptr;
}

absl::Status CheckServes(const pb::ClusterStatus& status, const std::string& name) {
  const pb::Worker* worker = FindWorker(status, name);
  if (worker == nullptr) return FailedPrecondition(name, " is no member of the cluster");
  if (worker->state() != "serving") return FailedPrecondition(name, " is ", worker->state(), ", not serving");
  return absl::OkStatus();
}

// Asks again as long as another worker of its role drains.
absl::Status BeginDrain(const ControlFlags& flags, const pb::DrainWorkerRequest& request) {
  while (true) {
    AdminCall call;
    DT_RETURN_IF_ERROR(Prepare(flags, call));
    pb::DrainWorkerReply reply;
    const grpc::Status done = call.stub->DrainWorker(&call.context, request, &reply);
    if (done.ok()) return absl::OkStatus();
    const bool another_drains = request.alone() && done.error_code() == grpc::StatusCode::ABORTED;
    if (!another_drains) return control::ExplainCallFailure("scheduler", flags.scheduler, call.security, done);
    absl::SleepFor(kWatchPause);
  }
}

}  // namespace

absl::Status RunStatus(const StatusFlags& flags) {
  const absl::StatusOr<pb::ClusterStatus> status = AskStatus(flags.control);
  if (!flags.alive.empty() && absl::IsUnavailable(status.status())) return absl::OkStatus();
  if (!status.ok()) return status.status();
  if (!flags.ready.empty()) return CheckServes(*status, flags.ready);
  if (flags.alive.empty()) {
    Print(*status);
  } else if (FindWorker(*status, flags.alive) == nullptr) {
    return FailedPrecondition(flags.alive, " is no member of the cluster");
  }
  return absl::OkStatus();
}

absl::Status RunDrain(const DrainFlags& drain) {
  const ControlFlags& flags = drain.control;
  const std::string& worker = drain.worker;
  pb::DrainWorkerRequest request;
  request.set_alone(drain.alone);
  char* end = nullptr;
  const unsigned long number = std::strtoul(worker.c_str(), &end, 10);
  if (*end == '\0' && !worker.empty()) {
    request.set_worker(static_cast<uint32_t>(number));
  } else {
    request.set_name(worker);
  }
  DT_RETURN_IF_ERROR(BeginDrain(flags, request));
  std::printf("%s drains: it gets no new sequences, and what it has moves to others\n", worker.c_str());
  std::fflush(stdout);
  while (true) {
    DT_ASSIGN_OR_RETURN(const pb::ClusterStatus status, AskStatus(flags));
    const bool here = std::any_of(status.workers().begin(), status.workers().end(), [&](const pb::Worker& member) {
      const bool named = member.name() == worker || std::to_string(member.worker()) == worker;
      return named && member.state() == "draining";
    });
    if (!here) break;
    absl::SleepFor(kWatchPause);
  }
  std::printf("%s holds nothing any more and has left\n", worker.c_str());
  return absl::OkStatus();
}

}  // namespace dovetail::cli
