#include "scheduler/cluster_scheduler.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/log.h"
#include "base/sha256.h"
#include "control/convert.h"
#include "proto/kv_blocks.h"
#include "scheduler/core/limits.h"
#include "scheduler/decode_limit.h"
#include "scheduler/stats_message.h"

namespace dovetail::scheduler {

namespace pb = control::v1;
using control::Role;

namespace {

constexpr absl::Duration kStatsWhileBusy = absl::Milliseconds(50);
constexpr absl::Duration kStatsWhileIdle = absl::Milliseconds(500);

}  // namespace

ClusterScheduler::ClusterScheduler(ClusterSchedulerOptions options, transport::Connector& connector, Clock& clock)
    : options_(std::move(options)),
      connector_(connector),
      clock_(clock),
      started_(clock.Now()),
      members_(options_.membership),
      generation_([this](const Event& event) { node_->Handle(event); },
                  options_.scheduler.max_queued_requests + options_.scheduler.max_num_seqs + 1),
      last_turn_(started_),
      last_progress_(started_),
      next_stats_(started_) {}

// ---- membership ----

absl::Status ClusterScheduler::CheckLength(const control::ModelSummary& model) const {
  if (options_.scheduler.max_model_len <= model.max_positions) return absl::OkStatus();
  return FailedPrecondition("--max-model-len of the scheduler: ", options_.scheduler.max_model_len, " exceeds the ",
                            model.max_positions, " positions of ", model.name);
}

absl::StatusOr<control::JoinReply> ClusterScheduler::Join(const control::JoinRequest& request) {
  if (request.model) DT_RETURN_IF_ERROR(CheckLength(*request.model));
  auto reply = members_.Join(request, clock_.Now());
  if (!reply.ok()) {
    LogWarning("refused: ", std::string(reply.status().message()));
    return reply;
  }
  LogInfo(request.name, " joins as ", control::NameOf(request.role), " worker ", reply->worker.value(), ": ",
          request.capabilities.cores, " cores, ",
          std::llround(static_cast<double>(request.capabilities.memory_bytes_per_s) * 1e-9), " GB/s",
          request.role == Role::kAttentionWorker
              ? absl::StrCat(", ", request.capabilities.kv_bytes >> 20, " MiB for KV")
              : absl::StrCat(", model ", request.model->name));
  if (members_.IsUnlike(request) && !std::exchange(warned_unlike_, true))
    LogWarning(request.name, " computes on ", request.capabilities.arithmetic,
               ", unlike the compute workers before it (--unlike-workers): a request that goes from one to the other "
               "may get other tokens, and long prompts are prefilled together only by workers that compute alike");
  if (reply->wants_model_files && request.model->files.empty()) {
    DT_RETURN_IF_ERROR(PutModelFiles(reply->worker, reply->epoch, {}));
    reply->wants_model_files = false;
  }
  return reply;
}

absl::StatusOr<uint64_t> ClusterScheduler::AnnouncedFileBytes(WorkerId worker, Epoch epoch) const {
  const Member* member = members_.Find(worker);
  if (member == nullptr || member->epoch != epoch || !member->request.model)
    return NotFound("worker ", worker.value(), " is no compute worker of this cluster; join again");
  uint64_t bytes = 0;
  for (const control::FileSummary& file : member->request.model->files) bytes += file.size;
  return bytes;
}

absl::Status ClusterScheduler::PutModelFiles(WorkerId worker, Epoch epoch, std::vector<std::string> contents) {
  const Member* member = members_.Find(worker);
  if (member == nullptr || member->epoch != epoch || !member->request.model)
    return NotFound("worker ", worker.value(), " is no compute worker of this cluster; join again");
  if (members_.model_complete()) return absl::OkStatus();  // another one brought them
  const auto& expected = member->request.model->files;
  if (contents.size() != expected.size())
    return InvalidArgument("model files: ", contents.size(), " came, ", expected.size(), " were announced");
  auto files = std::make_shared<std::vector<control::TextFile>>();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Sha256Digest digest = Sha256(std::as_bytes(std::span(contents[i].data(), contents[i].size())));
    if (contents[i].size() != expected[i].size ||
        std::string(reinterpret_cast<const char*>(digest.data()), digest.size()) != expected[i].sha256)
      return DataLoss("model files: ", expected[i].name, " is not the file that was announced");
    files->push_back({expected[i].name, std::move(contents[i])});
  }
  files_ = std::move(files);
  if (const absl::Status built = BuildNode(); !built.ok()) {
    std::vector<MemberAction> actions;
    members_.Refuse(worker, std::string(built.message()), actions);
    Perform(std::move(actions));
    return built;
  }
  std::vector<MemberAction> actions;
  members_.ModelComplete(actions);
  Perform(std::move(actions));
  return absl::OkStatus();
}

absl::Status ClusterScheduler::BuildNode() {
  if (node_ != nullptr) return absl::OkStatus();
  const control::ModelSummary& model = *members_.model();
  SchedulerOptions options = options_.scheduler;
  options.attention = model.attention;
  options.model_digest = model.digest;
  options.tell_cache = true;
  if (options.max_model_len == 0) options.max_model_len = static_cast<int>(model.max_positions);
  const bool on_gpu = members_.device() != "cpu";
  options.ChooseStepTokens(on_gpu);
  options.run_ahead = on_gpu && options.micro_batches == 1 && !options.adapt_micro_batches;  // of pairs
  DT_RETURN_IF_ERROR(options.Validate());
  options_.scheduler = options;
  node_ = std::make_unique<SchedulerNode>(
      options, options_.seed, connector_, clock_,
      [this](GenerationUpdate update) { generation_.OnUpdate(std::move(update)); },
      [this](const proto::StepResult& result, int sequences, int new_tokens) {
        last_progress_ = clock_.Now();
        generation_.OnStep(result, sequences, new_tokens);
      });
  node_->SetSpans(options_.spans);
  node_->SetCacheListener([this](const requests::CacheEvents& events) { generation_.OnCacheEvents(events); });
  generation_.SetCacheSnapshots([this] { return node_->CacheSnapshot(); });
  LogInfo("serving ", model.name, ": sequences of ", options.max_model_len, " tokens, ", options.max_num_seqs,
          " at a time");
  return absl::OkStatus();
}

std::optional<control::Role> ClusterScheduler::RoleOf(WorkerId worker) const {
  const Member* member = members_.Find(worker);
  return member == nullptr ? std::nullopt : std::optional(member->request.role);
}

absl::Status ClusterScheduler::Attend(WorkerId worker, Epoch epoch, WorkerStream stream) {
  std::vector<MemberAction> actions;
  DT_RETURN_IF_ERROR(members_.Attend(worker, epoch, clock_.Now(), actions));
  streams_[worker] = std::move(stream);
  Perform(std::move(actions));
  return absl::OkStatus();
}

void ClusterScheduler::CloseIfRefused(WorkerId worker, const absl::Status& status) {
  if (status.ok()) return;
  std::vector<MemberAction> actions;
  members_.Refuse(worker, std::string(status.message()), actions);
  Perform(std::move(actions));
}

void ClusterScheduler::OnHeartbeat(WorkerId worker, control::Heartbeat heartbeat) {
  const absl::Time now = clock_.Now();
  WatchLoopGap(now);
  members_.Heard(worker, std::move(heartbeat), now);
  const auto stream = streams_.find(worker);
  if (stream == streams_.end()) return;
  pb::SchedulerOrder order;
  order.mutable_beat();
  stream->second.send(std::move(order));
}

void ClusterScheduler::OnReady(WorkerId worker, const control::Ready& ready) {
  std::vector<MemberAction> actions;
  const absl::Status status = members_.Ready(worker, ready, clock_.Now(), actions);
  Perform(std::move(actions));
  CloseIfRefused(worker, status);
}

void ClusterScheduler::OnApplied(WorkerId worker, const control::Applied& applied) {
  std::vector<MemberAction> actions;
  const absl::Status status = members_.Applied(worker, applied, clock_.Now(), actions);
  Perform(std::move(actions));
  CloseIfRefused(worker, status);
}

void ClusterScheduler::OnLinkFailed(WorkerId worker, const control::LinkFailed& failed) {
  const absl::Time now = clock_.Now();
  WatchLoopGap(now);
  std::vector<MemberAction> actions;
  members_.LinkFailed(worker, failed, now, actions);
  Perform(std::move(actions));
}

void ClusterScheduler::OnStreamEnded(WorkerId worker, Epoch epoch) {
  const Member* member = members_.Find(worker);
  if (member == nullptr || member->epoch != epoch) return;
  std::vector<MemberAction> actions;
  members_.Gone(worker, "its connection ended", actions);
  Perform(std::move(actions));
}

void ClusterScheduler::Leave(WorkerId worker, Epoch epoch) {
  const Member* member = members_.Find(worker);
  if (member == nullptr || member->epoch != epoch) return;
  std::vector<MemberAction> actions;
  members_.Gone(worker, "it left", actions);
  Perform(std::move(actions));
}

// ---- actions ----

void ClusterScheduler::Perform(std::vector<MemberAction> actions) {
  pending_.insert(pending_.end(), std::make_move_iterator(actions.begin()), std::make_move_iterator(actions.end()));
  if (performing_) return;
  performing_ = true;
  for (size_t i = 0; i < pending_.size(); ++i) {
    const MemberAction action = std::move(pending_[i]);
    std::visit([this](const auto& a) { On(a); }, action);
  }
  pending_.clear();
  performing_ = false;
}

void ClusterScheduler::On(const SendConfiguration& action) {
  const auto stream = streams_.find(action.worker);
  if (stream == streams_.end()) return;
  control::Configuration configuration;
  configuration.attention = members_.model()->attention;
  configuration.model_digest = members_.model()->digest;
  configuration.kv_storage = members_.model()->kv_storage;
  configuration.deterministic = members_.model()->deterministic;
  configuration.micro_batches = kMaxMicroBatches;  // more come into use with more compute workers
  configuration.max_step_tokens = std::max(options_.scheduler.max_num_batched_tokens, options_.scheduler.max_num_seqs);
  pb::SchedulerOrder order;
  control::ToProto(configuration, *order.mutable_configuration());
  stream->second.send(std::move(order));
}

void ClusterScheduler::On(const SendPeers& action) {
  const auto stream = streams_.find(action.worker);
  if (stream == streams_.end()) return;
  pb::SchedulerOrder order;
  control::ToProto(action.peers, *order.mutable_peers());
  stream->second.send(std::move(order));
}

void ClusterScheduler::On(const ConnectNode& action) {
  const absl::Status status = connector_.AddPeer(action.node, action.epoch, action.address);
  if (status.ok()) return;
  std::vector<MemberAction> actions;
  members_.Refuse(action.worker, absl::StrCat("the scheduler cannot connect to it: ", std::string(status.message())),
                  actions);
  Perform(std::move(actions));
}

void ClusterScheduler::On(const DisconnectNode& action) { connector_.RemovePeer(action.node); }

void ClusterScheduler::On(const BeginServing& action) {
  const Member* member = members_.Find(action.worker);
  if (member == nullptr) return;
  LogInfo(member->request.name, " serves as ", control::NameOf(member->request.role), " worker ",
          member->worker.value(), " over ", connector_.LanesTo(member->request.node),
          member->ready.kv_blocks > 0 ? absl::StrCat(", ", member->ready.kv_blocks, " KV blocks",
                                                     DecodeLimit(member->request.capabilities, *members_.model(),
                                                                 options_.scheduler.max_model_len,
                                                                 /*layers_on_gpu=*/members_.device() != "cpu"))
                                      : std::string());
  if (member->request.role == Role::kAttentionWorker) {
    // Attention reads all KV once a step: what it takes is memory, and how fast that is read.
    const control::Capabilities& has = member->request.capabilities;
    const std::string few =
        proto::TooFewForASequence(members_.model()->attention, member->ready.kv_blocks,
                                  member->ready.kv_bytes / std::max<uint64_t>(1, member->ready.kv_blocks));
    if (!few.empty()) LogWarning(member->request.name, ": ", few);
    const Member* const partner = members_.PartnerOf(*member);
    node_->AddAttentionWorker(member->worker, member->epoch, member->request.node, member->ready.kv_blocks,
                              ReadRate(has), partner != nullptr ? std::optional(partner->worker) : std::nullopt);
  } else {
    node_->AddComputeWorker(member->worker, member->request.node, member->ready.leaves_states,
                            members_.KindOf(member->request));
  }
  next_stats_ = absl::InfinitePast();
}

void ClusterScheduler::On(const DrainMember& action) {
  const Member* member = members_.Find(action.worker);
  if (member == nullptr) return;
  LogInfo(member->request.name, " drains");
  if (member->request.role == Role::kAttentionWorker) node_->DrainAttentionWorker(member->worker, member->epoch);
}

void ClusterScheduler::On(const EndServing& action) {
  if (action.role == Role::kAttentionWorker) {
    node_->LoseAttentionWorker(action.worker, action.epoch);
  } else {
    node_->LoseComputeWorker(action.worker);
  }
  next_stats_ = absl::InfinitePast();
}

void ClusterScheduler::On(const LinkComputeWorkers& action) {
  const Member* one = members_.Find(action.one);
  const Member* other = members_.Find(action.other);
  if (one == nullptr || other == nullptr) return;
  const std::string names = absl::StrCat(one->request.name, " and ", other->request.name);
  if (action.linked)
    LogInfo(names, " are linked: prompts that both prefill may exchange directly");
  else
    LogWarning(names, " cannot reach each other: ", action.why,
               "; until they do, prompts that both prefill go by way of the attention workers");
  node_->LinkComputeWorkers(action.one, action.other, action.linked);
}

void ClusterScheduler::On(const EndSession& action) {
  LogInfo("worker ", action.worker.value(), " is out: ", action.why);
  const auto stream = streams_.find(action.worker);
  if (stream == streams_.end()) return;
  if (action.dismissed) {
    pb::SchedulerOrder order;
    order.mutable_dismissal()->set_reason(action.why);
    stream->second.send(std::move(order));
  }
  stream->second.close(absl::AbortedError(action.why));
  streams_.erase(stream);
}

// ---- servers and operators ----

absl::Status ClusterScheduler::GetModel(pb::GetModelReply& reply) const {
  if (node_ == nullptr || !members_.model_complete())
    return absl::UnavailableError(
        "no compute worker has joined yet; start `dovetail compute-worker MODEL --scheduler ...`");
  control::ToProto(*members_.model(), *reply.mutable_model());
  reply.set_max_model_len(options_.scheduler.max_model_len);
  reply.set_max_num_seqs(options_.scheduler.max_num_seqs);
  reply.set_max_queued_requests(options_.scheduler.max_queued_requests);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const std::vector<control::TextFile>>> ClusterScheduler::ModelFiles(
    uint64_t digest) const {
  if (files_ == nullptr || members_.model()->digest != digest)
    return NotFound("no model of that digest is served here");
  return files_;
}

absl::StatusOr<uint64_t> ClusterScheduler::AddServer(ControlGeneration::SendFn send) {
  if (node_ == nullptr) return absl::UnavailableError("no compute worker has joined yet");
  next_stats_ = absl::InfinitePast();
  return generation_.AddServer(std::move(send));
}

std::string ClusterScheduler::WhyNotServing() const {
  if (node_ == nullptr) return "no compute worker has joined yet";
  bool attention = false, compute = false;
  for (const auto& [id, member] : members_.members()) {
    if (member.state == MemberState::kServing && member.request.role == Role::kAttentionWorker) attention = true;
    if (member.state >= MemberState::kServing && member.request.role == Role::kComputeWorker) compute = true;
  }
  if (!compute) return "no compute worker serves; start `dovetail compute-worker MODEL --scheduler ...`";
  if (!attention) return "no attention worker serves; start `dovetail attention-worker --scheduler ...`";
  return "";
}

std::string ClusterScheduler::NameOfNode(NodeId node) const {
  if (node == NodeId(0)) return "scheduler";
  const Member* member = members_.FindNode(node);
  return member == nullptr ? std::string("gone") : member->request.name;
}

void ClusterScheduler::Describe(admin::v1::ClusterStatus& status) const {
  const absl::Time now = clock_.Now();
  status.set_version(control::kBuildVersion);
  status.set_cluster(options_.membership.cluster);
  status.set_uptime_seconds(absl::ToDoubleSeconds(now - started_));
  if (members_.model_complete()) {
    status.set_model(members_.model()->name);
    status.set_kv_cache_dtype(KvCacheDtypeOf(*members_.model()));
  }
  status.set_data_plane_version(options_.membership.data_plane_version);
  status.set_servers(generation_.servers());
  const std::string why_not = WhyNotServing();
  status.set_serving(why_not.empty());
  status.set_why_not(why_not);
  if (node_ != nullptr) {
    const SchedulerStats stats = node_->stats();
    status.set_running_sequences(stats.running_sequences);
    status.set_waiting_requests(stats.waiting_requests);
    status.set_generation_tokens(stats.generation_tokens);
    status.set_steps(stats.steps);
    status.set_max_model_len(static_cast<uint64_t>(options_.scheduler.max_model_len));
    status.set_longest_sequence(static_cast<uint64_t>(stats.longest_sequence));
    status.set_last_prefill(scheduler::Describe(stats.last_prefill));
  }
  for (const auto& [id, member] : members_.members()) {
    admin::v1::Worker& worker = *status.add_workers();
    worker.set_worker(member.worker.value());
    worker.set_name(member.request.name);
    worker.set_role(control::NameOf(member.request.role));
    worker.set_state(scheduler::NameOf(member.state));
    worker.set_node(member.request.node.value());
    worker.set_epoch(member.epoch.value());
    worker.set_cores(member.request.capabilities.cores);
    worker.set_memory_bytes_per_s(member.request.capabilities.memory_bytes_per_s);
    worker.set_kv_bytes(member.ready.kv_blocks > 0 ? member.ready.kv_bytes : member.request.capabilities.kv_bytes);
    worker.set_kv_blocks(member.ready.kv_blocks);
    worker.set_kv_blocks_in_use(member.last.kv_blocks_in_use);
    worker.set_kv_blocks_cached(member.last.kv_blocks_cached);
    worker.set_steps(member.last.steps);
    if (node_ != nullptr) worker.set_damaged_steps(node_->DamagedSteps(member.worker));
    worker.set_joined_seconds_ago(absl::ToDoubleSeconds(now - member.joined));
    worker.set_heard_seconds_ago(absl::ToDoubleSeconds(now - member.heard));
    for (std::string& name : members_.Unconnected(member)) worker.add_unconnected(std::move(name));
    for (const control::Link& link : member.last.links) {
      admin::v1::Link& to = *worker.add_links();
      to.set_node(link.node.value());
      to.set_peer(NameOfNode(link.node));
      to.set_lanes(link.lanes);
      to.set_message_bytes(link.message_bytes);
      to.set_tensor_bytes(link.tensor_bytes);
      to.set_exchange(link.exchange);
    }
  }
}

absl::Status ClusterScheduler::Drain(WorkerId worker, bool alone) {
  if (alone) DT_RETURN_IF_ERROR(members_.MayDrainAlone(worker));
  std::vector<MemberAction> actions;
  const absl::Status status = members_.Drain(worker, actions);
  Perform(std::move(actions));
  FinishDrains();
  return status;
}

absl::Status ClusterScheduler::Drain(const std::string& name, bool alone) {
  const Member* member = members_.FindName(name);
  if (member == nullptr) return NotFound("no worker is named ", name, "; `dovetail status` lists them");
  return Drain(member->worker, alone);
}

// The compute worker of a pair goes last: sequences of its attention worker step on it.
void ClusterScheduler::FinishDrains() {
  std::vector<MemberAction> actions;
  std::vector<WorkerId> done;
  for (const auto& [id, member] : members_.members()) {
    if (member.state != MemberState::kDraining) continue;
    const bool computes = member.request.role == Role::kComputeWorker;
    if (computes ? members_.PartnerOf(member) == nullptr : node_->HoldsNothing(id)) done.push_back(id);
  }
  for (const WorkerId worker : done) members_.Drained(worker, actions);
  if (!actions.empty()) Perform(std::move(actions));
}

// ---- the loop ----

pb::Stats ClusterScheduler::Stats() const {
  pb::Stats out;
  const SchedulerStats stats = node_->stats();
  DescribeScheduler(stats, out);
  uint64_t total = 0, in_use = 0, cached = 0;
  for (const auto& [id, member] : members_.members()) {
    total += member.last.kv_blocks_total;
    in_use += member.last.kv_blocks_in_use;
    cached += member.last.kv_blocks_cached;
    DescribeLoad(member, *out.add_workers());
    if (member.request.role != Role::kAttentionWorker) continue;
    pb::DamagedBlocks& damaged = *out.add_damaged_blocks();
    damaged.set_worker(member.request.name);
    damaged.set_node(member.request.node.value());
    damaged.set_blocks(member.last.damaged_blocks);
  }
  out.set_certificate_end(certificate_.end());
  out.set_kv_blocks_total(total);
  out.set_kv_blocks_in_use(in_use);
  out.set_kv_blocks_cached(cached);
  const std::string why_not = WhyNotServing();
  out.set_healthy(why_not.empty());
  out.set_error(why_not);
  const bool idle = stats.running_sequences == 0 && stats.waiting_requests == 0;
  out.set_idle_us(idle ? 0 : absl::ToInt64Microseconds(clock_.Now() - last_progress_));
  return out;
}

void ClusterScheduler::PublishStats(bool something_happened) {
  const absl::Time now = clock_.Now();
  const bool due = now >= next_stats_ || (something_happened && now >= next_stats_ - kStatsWhileIdle + kStatsWhileBusy);
  if (!due || node_ == nullptr || generation_.servers() == 0) return generation_.Flush(nullptr);
  next_stats_ = now + kStatsWhileIdle;
  const pb::Stats stats = Stats();
  generation_.Flush(&stats);
}

// If this process was stopped, or got no time, heartbeats could not be read, nor was it heard: that is no member's
// fault. What members said meanwhile waits for the loop and is read before its next turn.
void ClusterScheduler::WatchLoopGap(absl::Time now) {
  const absl::Duration gap = now - last_turn_;
  last_turn_ = now;
  if (gap > std::min(options_.membership.lease, options_.membership.silence) / 4) members_.Forgive(gap, now);
}

// A member of this host that was not stopped waits for a processor, or for its memory.
void ClusterScheduler::ExcuseWhoRunsHere(absl::Time now) {
  for (const WorkerId worker : members_.Overdue(now)) {
    const control::JoinRequest& request = members_.Find(worker)->request;
    if (RunsHere(request.runs_as) && members_.Excuse(worker, now))
      LogWarning(request.name, " is late, and was not stopped: this machine is busy");
  }
}

// Finds members that are heard on the control plane but whose frames do not arrive. If no member's frames arrive, this
// process itself is cut off from the data plane.
void ClusterScheduler::WatchDataPlane(absl::Time now, std::vector<MemberAction>& actions) {
  if (now < next_look_) return;
  next_look_ = now + options_.membership.heartbeat;
  const auto silent = connector_.SilentPeers();
  const auto connected = std::count_if(members_.members().begin(), members_.members().end(),
                                       [](const auto& entry) { return entry.second.known.contains(NodeId(0)); });
  if (silent.size() >= 2 && static_cast<int64_t>(silent.size()) == connected) {
    LogError("nothing comes from any worker on the data plane; start this scheduler again if it stays so");
    next_look_ = now + absl::Seconds(10);
    return;
  }
  for (const transport::Connector::Silence& peer : silent)
    members_.Unheard(peer.node, peer.epoch, now - peer.length, now, actions);
}

// Requests wait for workers that are started again, but not without limit: their clients have other servers to ask.
void ClusterScheduler::WatchServing(absl::Time now) {
  if (node_ == nullptr || now < next_look_at_serving_) return;
  next_look_at_serving_ = now + options_.membership.heartbeat;
  const std::string why_not = WhyNotServing();
  unserved_since_ = why_not.empty() ? absl::InfiniteFuture() : std::min(unserved_since_, now);
  const bool outage = now - unserved_since_ >= options_.unserved_timeout;
  if (outage == std::exchange(outage_, outage)) return;
  if (outage)
    LogError(why_not, "; requests end with 503 until one does");
  else
    LogInfo("requests are taken again");
  generation_.SetOutage(outage ? absl::UnavailableError(why_not) : absl::OkStatus());
}

int ClusterScheduler::Turn() {
  const absl::Time now = clock_.Now();
  WatchLoopGap(now);
  const int frames = node_ != nullptr ? node_->Poll() : 0;
  std::vector<MemberAction> actions;
  for (const transport::Connector::Failure& failure : connector_.TakeFailures())
    if (const Member* member = members_.FindNode(failure.node); member != nullptr && member->epoch == failure.epoch)
      members_.Gone(member->worker, absl::StrCat("the scheduler cannot reach it: ", failure.why), actions);
  if (node_ != nullptr)
    for (const SchedulerNode::Dismissal& dismissal : node_->TakeDismissals())
      members_.Refuse(dismissal.worker, dismissal.why, actions);
  WatchDataPlane(now, actions);
  ExcuseWhoRunsHere(now);
  members_.Expire(now, actions);
  if (!actions.empty()) Perform(std::move(actions));
  FinishDrains();
  WatchServing(now);
  PublishStats(frames > 0);
  return frames;
}

absl::Time ClusterScheduler::NextDeadline() const {
  absl::Time deadline = std::min(members_.NextDeadline(), last_turn_ + options_.membership.heartbeat);
  if (node_ != nullptr) deadline = std::min(deadline, node_->NextDeadline());
  return deadline;
}

}  // namespace dovetail::scheduler
