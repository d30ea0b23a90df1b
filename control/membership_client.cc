#include "control/membership_client.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/thread_name.h"
#include "control/awake_silence.h"
#include "control/convert.h"
#include "control/table_limits.h"

namespace dovetail::control {
namespace {

constexpr absl::Duration kTablePatience = absl::Seconds(30);
constexpr absl::Duration kStarvation = absl::Seconds(10);    // of a scheduler that lives on this host
constexpr absl::Duration kTableTimeout = absl::Seconds(60);  // for a call that carries one

int64_t NowMicros() { return absl::ToUnixMicros(SystemClock().Now()); }

std::chrono::system_clock::time_point DeadlineIn(absl::Duration timeout) {
  return std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MembershipClient>> MembershipClient::Join(const Options& options) {
  std::unique_ptr<MembershipClient> client(new MembershipClient(options));
  DT_ASSIGN_OR_RETURN(client->channel_, MakeChannel("--scheduler", options.scheduler, options.security));
  client->stub_ = v1::Membership::NewStub(client->channel_);
  DT_RETURN_IF_ERROR(client->JoinNow());
  if (client->reply_.wants_model_files) DT_RETURN_IF_ERROR(client->PutFiles());
  AddToken(options.security, client->stream_context_);
  client->stream_ = client->stub_->Attend(&client->stream_context_);
  v1::WorkerReport hello;
  ToProto(Heartbeat{}, *hello.mutable_heartbeat());
  client->Write(std::move(hello));  // a failure shows in Run()
  return client;
}

MembershipClient::~MembershipClient() {
  Stop();
  if (stream_ == nullptr) return;
  v1::SchedulerOrder rest;
  while (stream_->Read(&rest)) {
  }
  stream_->Finish();
}

void MembershipClient::Prepare(grpc::ClientContext& context) const {
  AddToken(options_.security, context);
  context.set_deadline(DeadlineIn(options_.call_timeout));
}

absl::Status MembershipClient::JoinNow() {
  if (options_.request.model.has_value()) DT_RETURN_IF_ERROR(CheckTableBytes(options_.request.model->attention));
  grpc::ClientContext context;
  Prepare(context);
  v1::JoinRequest request;
  ToProto(options_.request, request);
  if (request.ByteSizeLong() > kFileChunkBytes) context.set_deadline(DeadlineIn(kTableTimeout));
  v1::JoinReply reply;
  const grpc::Status status = stub_->Join(&context, request, &reply);
  if (!status.ok()) return ExplainCallFailure("scheduler", options_.scheduler, options_.security, status);
  DT_ASSIGN_OR_RETURN(reply_, FromProto(reply));
  return absl::OkStatus();
}

absl::Status MembershipClient::PutFiles() {
  grpc::ClientContext context;
  AddToken(options_.security, context);
  context.set_deadline(DeadlineIn(absl::Seconds(60)));
  v1::PutModelFilesReply reply;
  const auto writer = stub_->PutModelFiles(&context, &reply);
  bool open = true;
  for (size_t file = 0; file < options_.files.size() && open; ++file) {
    const std::string& bytes = options_.files[file].bytes;
    for (size_t at = 0; at < bytes.size() && open; at += kFileChunkBytes) {
      v1::ModelFileChunk chunk;
      chunk.set_worker(reply_.worker.value());
      chunk.set_epoch(reply_.epoch.value());
      chunk.set_file(static_cast<uint32_t>(file));
      chunk.set_data(bytes.substr(at, kFileChunkBytes));
      open = writer->Write(chunk);
    }
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (status.ok()) return absl::OkStatus();
  return Annotate(ExplainCallFailure("scheduler", options_.scheduler, options_.security, status),
                  "sending the tokenizer files");
}

bool MembershipClient::Write(v1::WorkerReport report) {
  report.set_worker(reply_.worker.value());
  report.set_epoch(reply_.epoch.value());
  MutexLock lock(write_mutex_);
  return stream_ != nullptr && stream_->Write(report);
}

void MembershipClient::Beat(const std::function<Heartbeat()>& heartbeat) {
  NameThread("dt-heartbeat");
  const auto interval = std::chrono::milliseconds(reply_.heartbeat_ms);
  // The scheduler answers every heartbeat; it is given longer than it gives us, so that its view of a cut comes first.
  // Before it does, a large table may be on its way.
  const absl::Duration usual_patience = 3 * absl::Milliseconds(reply_.lease_ms);
  AwakeSilence awake(absl::Milliseconds(reply_.heartbeat_ms), absl::FromUnixMicros(heard_us_), SystemClock().Now());
  uint64_t number = 0;
  MutexLock lock(mutex_);
  while (!wake_.wait_for(lock, interval, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_; })) {
    lock.unlock();
    Heartbeat beat = heartbeat();
    beat.sequence_number = ++number;
    beat.certificate_end = certificate_.end();
    v1::WorkerReport report;
    ToProto(beat, *report.mutable_heartbeat());
    const bool written = Write(std::move(report));
    const absl::Duration patience = configured_ ? usual_patience : std::max(usual_patience, kTablePatience);
    const absl::Duration silence = awake.Look(absl::FromUnixMicros(heard_us_), SystemClock().Now());
    if (silence > patience && (silence > kStarvation || !RunsHere(reply_.scheduler))) {
      silent_ms_ = absl::ToInt64Milliseconds(silence);
      stream_context_.TryCancel();
    }
    lock.lock();
    if (!written) return;
  }
}

absl::Status MembershipClient::Run(const Handlers& handlers) {
  heard_us_ = NowMicros();
  std::thread beating([&] { Beat(handlers.heartbeat); });
  absl::Status end;
  v1::SchedulerOrder order;
  while (end.ok() && stream_->Read(&order)) {
    heard_us_ = NowMicros();
    if (order.has_configuration()) {
      auto configuration = FromProto(order.configuration());
      configured_ = true;
      heard_us_ = NowMicros();
      end = configuration.status();
      if (end.ok()) handlers.on_configuration(*std::move(configuration));
    } else if (order.has_peers()) {
      auto peers = FromProto(order.peers());
      end = peers.status();
      if (end.ok()) handlers.on_peers(*std::move(peers));
    } else if (order.has_dismissal()) {
      end = absl::AbortedError(order.dismissal().reason().substr(0, 4096));
    }
  }
  {
    MutexLock lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
  stream_context_.TryCancel();
  beating.join();
  const grpc::Status status = stream_->Finish();
  {
    MutexLock lock(write_mutex_);
    stream_.reset();
  }
  if (stopped_) return absl::OkStatus();
  if (!end.ok()) return end;
  if (silent_ms_ > 0)
    return absl::UnavailableError(
        absl::StrCat("scheduler ", options_.scheduler, ": silent for ", silent_ms_.load(), " ms; is the network cut?"));
  // A refusal (this worker's lease ran out, say) comes as the stream's status; joining again is the remedy for all of
  // them.
  return absl::UnavailableError(absl::StrCat("scheduler ", options_.scheduler, ": ",
                                             status.ok() ? "ended the membership" : status.error_message()));
}

void MembershipClient::ReportReady(const Ready& ready) {
  v1::WorkerReport report;
  ToProto(ready, *report.mutable_ready());
  Write(std::move(report));
}

void MembershipClient::ReportApplied(const Applied& applied) {
  v1::WorkerReport report;
  ToProto(applied, *report.mutable_applied());
  Write(std::move(report));
}

void MembershipClient::ReportLinkFailed(const LinkFailed& failed) {
  v1::WorkerReport report;
  ToProto(failed, *report.mutable_link_failed());
  Write(std::move(report));
}

void MembershipClient::Leave() {
  grpc::ClientContext context;
  AddToken(options_.security, context);
  context.set_deadline(DeadlineIn(absl::Seconds(1)));
  v1::LeaveRequest request;
  request.set_worker(reply_.worker.value());
  request.set_epoch(reply_.epoch.value());
  v1::LeaveReply reply;
  stub_->Leave(&context, request, &reply);  // if it fails, the end of the stream says the same
  Stop();
}

void MembershipClient::Stop() {
  stopped_ = true;
  stream_context_.TryCancel();
}

}  // namespace dovetail::control
