#include "scheduler/control_members.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <variant>

#include "base/dtype.h"
#include "proto/attention_spec.h"
#include "proto/frame.h"

namespace dovetail::scheduler {

using control::Role;

namespace {

constexpr size_t kDrainedProcesses = 1024;  // remembered

// Of two tables that are equal except for the type in which linear states are kept: theirs, and ours.
std::optional<std::pair<DType, DType>> StateTypesThatDiffer(const proto::AttentionTable& theirs,
                                                            const proto::AttentionTable& ours) {
  std::optional<std::pair<DType, DType>> types;
  if (theirs.groups.size() != ours.groups.size()) return std::nullopt;
  for (size_t group = 0; group < ours.groups.size(); ++group) {
    const auto* theirs_linear = std::get_if<proto::LinearSpec>(&theirs.groups[group]);
    const auto* ours_linear = std::get_if<proto::LinearSpec>(&ours.groups[group]);
    if (theirs_linear == nullptr || ours_linear == nullptr) {
      if (theirs.groups[group] != ours.groups[group]) return std::nullopt;
      continue;
    }
    proto::LinearSpec same = *theirs_linear;
    same.state = ours_linear->state;
    same.blocks_per_head = ours_linear->blocks_per_head;  // follows from the type
    if (same != *ours_linear) return std::nullopt;
    if (theirs_linear->state != ours_linear->state) types.emplace(theirs_linear->state, ours_linear->state);
  }
  return types;
}

// The remedy where two members have never heard each other.
constexpr char kNeverConnected[] =
    "; let their hosts reach each other's --data-ports, and give --data-devices of one network";
constexpr uint32_t kAtWorkMs = 100;                                  // a turn of so long is work
constexpr absl::Duration kLateIsOneStory = absl::Milliseconds(500);  // between two reports of it
constexpr absl::Duration kLostLately = absl::Seconds(5);
constexpr absl::Duration kLooksAgo = absl::Milliseconds(100);  // two of a worker's looks, of which each says it again

// Blocks have the size of the largest group's: 64 tokens of one head. A GPU may keep types of 16 bits in 8.
uint64_t LeastBlockBytes(const std::optional<control::ModelSummary>& model) {
  uint64_t bytes = 1;
  if (!model) return bytes;
  for (const proto::AttentionSpec& spec : model->attention.groups)
    if (const auto* softmax = std::get_if<proto::SoftmaxSpec>(&spec))
      bytes = std::max(bytes, 64 * static_cast<uint64_t>(softmax->key_dim + softmax->value_dim) *
                                  (softmax->kv == DType::kF32 ? 4 : 1));
  return bytes;
}

bool AtWork(const Member& member) { return member.last.busy_ms >= kAtWorkMs; }

}  // namespace

std::string KvCacheDtypeOf(const control::ModelSummary& model) {
  if (model.kv_storage != KvStorage::kAsSent) return std::string(dovetail::Name(model.kv_storage));
  for (const proto::SoftmaxSpec& spec : model.attention.views)
    if (!spec.linear()) return std::string(dovetail::Name(spec.kv));
  return "";
}

const char* NameOf(MemberState state) {
  switch (state) {
    case MemberState::kJoining: return "joining";
    case MemberState::kWaiting: return "waiting";
    case MemberState::kPreparing: return "preparing";
    case MemberState::kConnecting: return "connecting";
    case MemberState::kServing: return "serving";
    case MemberState::kDraining: return "draining";
  }
  return "unknown";
}

Member* ControlMembers::Mutable(WorkerId worker) {
  const auto it = members_.find(worker);
  return it == members_.end() ? nullptr : &it->second;
}
const Member* ControlMembers::Find(WorkerId worker) const { return const_cast<ControlMembers*>(this)->Mutable(worker); }

const Member* ControlMembers::FindNode(NodeId node) const {
  for (const auto& [id, member] : members_)
    if (member.request.node == node) return &member;
  return nullptr;
}

const Member* ControlMembers::FindName(const std::string& name) const {
  for (const auto& [id, member] : members_)
    if (member.request.name == name) return &member;
  return nullptr;
}

absl::Status ControlMembers::CheckVersions(const control::JoinRequest& request) const {
  if (request.frame_version != proto::kFrameVersion)
    return FailedPrecondition(request.name, ": speaks version ", request.frame_version,
                              " of the data frames, this scheduler version ", proto::kFrameVersion,
                              "; run the same release of dovetail everywhere");
  if (request.data_plane_version != options_.data_plane_version)
    return FailedPrecondition(request.name, ": uses ", request.data_plane_version, ", this scheduler ",
                              options_.data_plane_version,
                              "; different versions do not understand each other: install one on every host");
  return absl::OkStatus();
}

absl::Status ControlMembers::CheckModel(const control::JoinRequest& request) const {
  if (!model_ || !request.model) return absl::OkStatus();
  if (request.model->kv_storage != model_->kv_storage)
    return FailedPrecondition(request.name, ": attends K and V ", std::string(Name(request.model->kv_storage)),
                              ", but this cluster's compute workers ", std::string(Name(model_->kv_storage)),
                              "; give it the same --kv-cache-dtype, or start another scheduler");
  if (request.model->deterministic != model_->deterministic)
    return FailedPrecondition(request.name, ": runs ", request.model->deterministic ? "with" : "without",
                              " --deterministic on a GPU, and this cluster's compute workers ",
                              model_->deterministic ? "with" : "without", " it; start all of them alike");
  if (request.model->digest == model_->digest && request.model->attention.op_group == model_->attention.op_group &&
      request.model->attention.groups == model_->attention.groups)
    return absl::OkStatus();
  if (const auto dtypes = StateTypesThatDiffer(request.model->attention, model_->attention))
    return FailedPrecondition(request.name, ": keeps linear states in ", std::string(Name(dtypes->first)),
                              ", but this cluster keeps them in ", std::string(Name(dtypes->second)),
                              "; give it the same --state-dtype, or start another scheduler");
  return FailedPrecondition(
      request.name, ": brings the model ", request.model->name, ", but this cluster serves ", model_->name,
      " (or another --dtype or --kv-cache-dtype of it); give it the same model and flags, or start another scheduler");
}

bool ControlMembers::IsUnlike(const control::JoinRequest& request) const {
  const std::string& arithmetic = request.capabilities.arithmetic;
  return model_ && request.model && !arithmetic.empty() && !arithmetic_.empty() && arithmetic != arithmetic_;
}

int ControlMembers::KindOf(const control::JoinRequest& request) const {
  const auto at = std::find(other_arithmetics_.begin(), other_arithmetics_.end(), request.capabilities.arithmetic);
  return IsUnlike(request) && at != other_arithmetics_.end() ? 1 + static_cast<int>(at - other_arithmetics_.begin())
                                                             : 0;
}

absl::Status ControlMembers::CheckArithmetic(const control::JoinRequest& request) const {
  if (options_.unlike_workers || !IsUnlike(request)) return absl::OkStatus();
  return FailedPrecondition(
      request.name, ": computes on ", request.capabilities.arithmetic, ", but ", computed_by_, " of this cluster on ",
      arithmetic_,
      "; a request that goes from one to the other could get other tokens: give it the same "
      "--device and flags (DOVETAIL_MAX_CPU_ISA for CPUs that differ), or start the scheduler with "
      "--unlike-workers");
}

absl::StatusOr<control::JoinReply> ControlMembers::Join(const control::JoinRequest& request, absl::Time now) {
  DT_RETURN_IF_ERROR(CheckVersions(request));
  // It would serve again, against what its operator was told: its dismissal was lost with its connection.
  if (request.process != 0 && std::find(drained_.begin(), drained_.end(), request.process) != drained_.end())
    return absl::AbortedError(absl::StrCat(request.name, ": this process was drained; start another one"));
  DT_RETURN_IF_ERROR(CheckModel(request));
  DT_RETURN_IF_ERROR(CheckArithmetic(request));
  if (const Member* other = FindNode(request.node); other != nullptr)
    return absl::AlreadyExistsError(
        absl::StrCat(request.name, ": this process is already a member, as worker ", other->worker.value()));
  if (used_nodes_.contains(request.node) || request.node == kSchedulerNode)
    return absl::AlreadyExistsError(
        absl::StrCat(request.name, ": node ", request.node.value(), " was a member before; join with a new one"));
  if (FindName(request.name) != nullptr)
    return absl::AlreadyExistsError(
        absl::StrCat(request.name, ": a worker of this name is a member; stop it, or give another --name"));
  if (static_cast<int>(members_.size()) >= options_.max_members)
    return ResourceExhausted("the cluster has its ", options_.max_members,
                             " members; raise --max-workers of the scheduler");
  Member member;
  member.worker = WorkerId(next_worker_++);
  member.epoch = request.epoch;
  member.request = request;
  member.joined = member.heard = now;
  if (request.model && !model_) {
    model_ = request.model;
    model_complete_ = false;
    computed_by_ = request.name;
    arithmetic_ = request.capabilities.arithmetic;
    device_ = request.capabilities.device;
  }
  if (IsUnlike(request) && KindOf(request) == 0) other_arithmetics_.push_back(request.capabilities.arithmetic);
  used_nodes_.insert(request.node);
  const bool wants_files = request.model && !model_complete_;
  const control::JoinReply reply{member.worker,
                                 member.epoch,
                                 static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.lease)),
                                 static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.heartbeat)),
                                 wants_files,
                                 options_.cluster,
                                 options_.process};
  members_.emplace(member.worker, std::move(member));
  return reply;
}

absl::Status ControlMembers::Attend(WorkerId worker, Epoch epoch, absl::Time now, std::vector<MemberAction>& actions) {
  Member* member = Mutable(worker);
  if (member == nullptr || member->epoch != epoch)
    return NotFound("worker ", worker.value(), " of epoch ", epoch.value(),
                    " is no member (its lease ran out?); join again");
  if (member->state != MemberState::kJoining)
    return absl::AlreadyExistsError(absl::StrCat("worker ", worker.value(), " attends already"));
  member->state = MemberState::kWaiting;
  member->heard = now;
  actions.push_back(ConnectNode{worker, member->request.node, member->epoch, member->request.data_plane_address});
  if (model_complete_) Configure(*member, actions);
  return absl::OkStatus();
}

void ControlMembers::ModelComplete(std::vector<MemberAction>& actions) {
  if (model_complete_ || !model_) return;
  model_complete_ = true;
  for (auto& [id, member] : members_)
    if (member.state == MemberState::kWaiting) Configure(member, actions);
}

void ControlMembers::Configure(Member& member, std::vector<MemberAction>& actions) {
  member.state = MemberState::kPreparing;
  actions.push_back(SendConfiguration{member.worker});
}

void ControlMembers::Heard(WorkerId worker, control::Heartbeat heartbeat, absl::Time now) {
  Member* member = Mutable(worker);
  if (member == nullptr) return;
  const absl::Duration pause = now - member->heard;
  if (pause > 2 * options_.heartbeat) member->back_since = now;
  const double halved = absl::FDivDuration(pause, options_.lateness_half_life);
  member->lateness = std::max(pause - 2 * options_.heartbeat, member->lateness * std::exp2(-halved));
  member->heard = now;
  member->suspected = false;
  if (heartbeat.links.empty()) heartbeat.links = std::move(member->last.links);
  member->last = std::move(heartbeat);
  if (AtWork(*member)) member->at_work = now;
}

absl::Status ControlMembers::Ready(WorkerId worker, const control::Ready& ready, absl::Time now,
                                   std::vector<MemberAction>& actions) {
  Member* member = Mutable(worker);
  if (member == nullptr) return NotFound("worker ", worker.value(), " is no member");
  if (member->state != MemberState::kPreparing)
    return FailedPrecondition("worker ", worker.value(), " is ready, but was not configured or said so before");
  if (member->request.role == Role::kAttentionWorker && (ready.kv_blocks == 0 || ready.kv_blocks > UINT32_MAX))
    return InvalidArgument("worker ", worker.value(), ": ", ready.kv_blocks, " KV blocks are not in 1..2^32");
  const uint64_t bytes = member->request.capabilities.kv_bytes;
  if (ready.kv_bytes > bytes)
    return InvalidArgument(member->request.name, ": says that its KV has ", ready.kv_bytes,
                           " bytes, but it joined with ", bytes, "; run the same release of dovetail everywhere");
  if (ready.kv_blocks > bytes / LeastBlockBytes(model_))
    return InvalidArgument(member->request.name, ": says that it has ", ready.kv_blocks, " KV blocks, but the ", bytes,
                           " bytes it joined with hold ", bytes / LeastBlockBytes(model_),
                           " at most; run the same release of dovetail everywhere");
  member->ready = ready;
  member->heard = now;
  member->state = MemberState::kConnecting;
  SendPeersToAll(actions);
  return absl::OkStatus();
}

void ControlMembers::SendPeersTo(Member& member, std::vector<MemberAction>& actions) {
  control::Peers peers;
  peers.peers.push_back({kSchedulerNode, options_.epoch, WorkerId(0), Role::kScheduler, options_.data_plane_address});
  for (const auto& [id, other] : members_)
    if (NeedsPeer(member, other))
      peers.peers.push_back(
          {other.request.node, other.epoch, other.worker, other.request.role, other.request.data_plane_address});
  if (peers.peers == member.last_sent) return;
  member.last_sent = peers.peers;
  peers.version = version_;
  std::set<NodeId> nodes;
  for (const control::Peer& peer : peers.peers) nodes.insert(peer.node);
  // What it is told to disconnect cannot be relied on from now on.
  std::erase_if(member.known, [&](NodeId node) { return !nodes.contains(node); });
  member.sent.emplace_back(peers.version, std::move(nodes));
  actions.push_back(SendPeers{member.worker, std::move(peers)});
}

void ControlMembers::SendPeersToAll(std::vector<MemberAction>& actions) {
  ++version_;
  for (auto& [id, member] : members_)
    if (IsUp(member)) SendPeersTo(member, actions);
}

absl::Status ControlMembers::Applied(WorkerId worker, const control::Applied& applied, absl::Time now,
                                     std::vector<MemberAction>& actions) {
  Member* member = Mutable(worker);
  if (member == nullptr) return NotFound("worker ", worker.value(), " is no member");
  member->heard = now;
  const auto it = std::find_if(member->sent.begin(), member->sent.end(),
                               [&](const auto& list) { return list.first == applied.peers_version; });
  if (it == member->sent.end())
    return FailedPrecondition("worker ", worker.value(), " applied peers of version ", applied.peers_version,
                              ", which it was not sent");
  for (const NodeId node : it->second) {
    const bool meant = std::any_of(member->last_sent.begin(), member->last_sent.end(),
                                   [&](const control::Peer& peer) { return peer.node == node; });
    const bool connected =
        std::find(applied.unconnected.begin(), applied.unconnected.end(), node) == applied.unconnected.end();
    if (!meant || !connected) continue;
    member->known.insert(node);
    if (const Member* peer = FindNode(node); peer != nullptr) bad_links_.Works(worker, peer->worker);
  }
  member->sent.erase(member->sent.begin(), it);  // of this one it may say more
  ServeWhoCan(actions);
  return absl::OkStatus();
}

bool ControlMembers::MayServe(const Member& member) const {
  if (member.state != MemberState::kConnecting || !member.known.contains(kSchedulerNode)) return false;
  // Plans are given to compute workers that serve and name attention workers that serve, and sequences move between
  // those. A compute worker that still connects holds up an attention worker only where no other one serves.
  const bool first = std::none_of(members_.begin(), members_.end(), [](const auto& entry) {
    return entry.second.request.role == Role::kComputeWorker && IsServing(entry.second);
  });
  return std::all_of(members_.begin(), members_.end(), [&](const auto& entry) {
    const Member& other = entry.second;
    const bool unlike = member.request.role != other.request.role;
    const bool must = IsServing(other) || (first && unlike && member.request.role == Role::kAttentionWorker);
    return !must || !MustReach(member, other) || Connected(member, other);
  });
}

void ControlMembers::ServeWhoCan(std::vector<MemberAction>& actions) {
  for (auto& [id, member] : members_) {
    if (!MayServe(member)) continue;
    member.state = MemberState::kServing;
    actions.push_back(BeginServing{member.worker});
  }
  TellLinks(actions);
}

void ControlMembers::Remove(WorkerId worker, const std::string& why, bool dismissed,
                            std::vector<MemberAction>& actions) {
  const auto it = members_.find(worker);
  if (it == members_.end()) return;
  const Member member = std::move(it->second);
  members_.erase(it);
  bad_links_.Forget(worker);
  std::erase_if(told_links_,
                [&](const auto& told) { return told.first.first == worker || told.first.second == worker; });
  // A compute worker that died before its files came leaves no model behind.
  if (member.request.role == Role::kComputeWorker && model_ && !model_complete_ &&
      std::none_of(members_.begin(), members_.end(),
                   [](const auto& other) { return other.second.request.role == Role::kComputeWorker; }))
    model_.reset();
  if (IsServing(member)) actions.push_back(EndServing{worker, member.request.role, member.epoch, why});
  if (member.state > MemberState::kJoining) actions.push_back(DisconnectNode{member.request.node});
  // A worker that was told to leave is not admitted again because it fell silent while it left.
  const bool drained = member.state == MemberState::kDraining || why == kDrained;
  if (drained && member.request.process != 0) {
    drained_.push_back(member.request.process);
    if (drained_.size() > kDrainedProcesses) drained_.pop_front();
  }
  actions.push_back(EndSession{worker, dismissed || drained, drained ? kDrained : why});
  if (!IsUp(member)) return;
  SendPeersToAll(actions);
  ServeWhoCan(actions);  // members that waited for its connection no longer have to
}

// Suspicion shortens the lease at once. A member whose heartbeats come all the same and that has nothing else to do has
// a limit, too.
bool ControlMembers::LateForTooLong(Member& member, absl::Time now) const {
  member.suspected = true;
  if (AtWork(member) || now - member.late_at > kLateIsOneStory) member.late_since = now;
  member.late_at = now;
  return now - member.late_since >= options_.longest_lateness;
}

// A member counts as silent on the data plane only if it was heard on the control plane during that time, and told that
// its loop turned all the while. Otherwise its process may have been stopped, or its loop got no time: then its lease
// decides, and it must be heard on both planes again.
bool ControlMembers::IsCutOff(const Member& member, absl::Time now) const {
  return now - member.heard < options_.silence && now - std::max(member.back_since, member.at_work) >= options_.silence;
}

// The compute worker is what its bad links have in common.
bool ControlMembers::LacksSeveral(const Member& compute, const Member& attention, absl::Time now) const {
  const auto lately = std::count_if(compute.lost.begin(), compute.lost.end(),
                                    [&](absl::Time lost) { return now - lost <= kLostLately; });
  const int lacks = BadLinksOf(compute) + static_cast<int>(lately);
  return lacks >= 2 && lacks > BadLinksOf(attention);
}

// Links that members can do without say nothing about which of two is of less use.
int ControlMembers::WorkingLinks(const Member& member) const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [&](const auto& entry) {
    const Member& other = entry.second;
    return MustReach(member, other) && Connected(member, other) && !bad_links_.Contains(member.worker, other.worker);
  }));
}

int ControlMembers::BadLinksOf(const Member& member) const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [&](const auto& entry) {
    return MustReach(member, entry.second) && bad_links_.Contains(member.worker, entry.second.worker);
  }));
}

bool ControlMembers::ServedByAnother(const Member& attention, const Member& compute) const {
  return std::any_of(members_.begin(), members_.end(), [&](const auto& entry) {
    const Member& member = entry.second;
    return member.request.role == Role::kComputeWorker && member.worker != compute.worker && IsServing(member) &&
           Connected(member, attention) && !bad_links_.Contains(member.worker, attention.worker);
  });
}

// An attention worker that a second compute worker reaches does not depend on the first: the one that can do less
// without the other goes, and the attention worker of two that are alike.
const Member& ControlMembers::WhoMustGo(const Member& one, const Member& other, absl::Time now) const {
  if (one.request.role == other.request.role) return IsServing(one) ? other : one;
  const Member& attention = one.request.role == Role::kAttentionWorker ? one : other;
  const Member& compute = &attention == &one ? other : one;
  if (!ServedByAnother(attention, compute)) {
    return Connected(one, other) && LacksSeveral(compute, attention, now) ? compute : attention;
  }
  const int compute_lacks = BadLinksOf(compute), attention_lacks = BadLinksOf(attention);
  if (compute_lacks != attention_lacks) return compute_lacks > attention_lacks ? compute : attention;
  return WorkingLinks(compute) < WorkingLinks(attention) ? compute : attention;
}

void ControlMembers::Part(const Member& one, const Member& other, const std::string& why, absl::Time now,
                          std::vector<MemberAction>& actions) {
  const Member& gone = WhoMustGo(one, other, now);
  const Member& stays = &gone == &one ? other : one;
  if (stays.request.role == Role::kComputeWorker) {
    std::vector<absl::Time>& lost = Mutable(stays.worker)->lost;
    std::erase_if(lost, [&](absl::Time then) { return now - then > kLostLately; });
    lost.push_back(now);
  }
  Refuse(gone.worker,
         absl::StrCat(gone.request.name, " and ", stays.request.name, " cannot reach each other: ", why,
                      Connected(one, other) ? "" : kNeverConnected),
         actions);
}

// Both ends were heard after the word that one of them has ended would have come.
bool ControlMembers::CanBeJudged(const BadLinks::Ends& ends, const BadLink& link, absl::Time now) const {
  const Member& one = members_.at(ends.first);
  const Member& other = members_.at(ends.second);
  const absl::Time settled = link.since + options_.settling;
  if (now < settled || one.heard < settled || other.heard < settled) return false;
  // A worker that got no time may have found silent, once, whose frames it had not read yet.
  if (!link.broken && link.said < settled - kLooksAgo) return false;
  // Between two attention workers that serve only a move fails, but the ranks of a prefill group would wait for each
  // other, unless they can do without the link. A link that does not come up keeps the newcomer of the two from
  // serving: it tries again, with a new connection.
  if (one.request.role == Role::kComputeWorker && other.request.role == Role::kComputeWorker)
    return options_.compute_links == ComputeLinks::kRequired;
  return one.request.role != other.request.role || IsServing(one) != IsServing(other);
}

void ControlMembers::JudgeLinks(absl::Time now, std::vector<MemberAction>& actions) {
  bad_links_.ForgetMended(now);
  const auto& links = bad_links_.links();
  const auto due = [&] {
    return std::find_if(links.begin(), links.end(),
                        [&](const auto& entry) { return CanBeJudged(entry.first, entry.second, now); });
  };
  for (auto link = due(); link != links.end(); link = due()) {
    const std::string why = link->second.why;
    Part(members_.at(link->first.first), members_.at(link->first.second), why, now, actions);
  }
}

void ControlMembers::LinkFailed(WorkerId reporter, const control::LinkFailed& failed, absl::Time now,
                                std::vector<MemberAction>& actions) {
  using Kind = control::LinkFailed::Kind;
  Member* from = Mutable(reporter);
  if (from == nullptr) return;
  if (failed.node == kSchedulerNode) {
    if (failed.kind != Kind::kBroken && now < away_until_) return;
    const char* remedy = from->known.contains(kSchedulerNode) ? "" : kNeverConnected;
    return Refuse(reporter, absl::StrCat(from->request.name, " cannot reach the scheduler: ", failed.why, remedy),
                  actions);
  }
  const Member* found = FindNode(failed.node);
  if (found == nullptr || found->epoch != failed.epoch) return;  // gone already
  Member* peer = Mutable(found->worker);
  const bool unlike = from->request.role != peer->request.role;
  if (failed.kind == Kind::kLate) {
    if (unlike && LateForTooLong(*peer, now))
      Refuse(peer->worker, absl::StrCat(peer->request.name, " is late for ", from->request.name, ": ", failed.why),
             actions);
    return;
  }
  if (failed.kind == Kind::kSilent) {
    if (AtWork(*peer)) return;
    if (unlike && now - peer->heard > options_.suspect_lease) {  // nothing on either plane
      peer->suspected = true;
      return;
    }
  }
  if (failed.kind == Kind::kBroken || !IsCutOff(*peer, now)) peer->suspected = true;
  if (failed.kind == Kind::kBroken || IsCutOff(*peer, now))
    bad_links_.Note(reporter, peer->worker, failed.kind == Kind::kBroken, failed.why, now);
  TellLinks(actions);
}

// What counts of the silence is what had passed when the member was last heard on the control plane: since then it may
// have been stopped.
void ControlMembers::Unheard(NodeId node, Epoch epoch, absl::Time since, absl::Time now,
                             std::vector<MemberAction>& actions) {
  const Member* member = FindNode(node);
  if (member == nullptr || member->epoch != epoch || !member->known.contains(kSchedulerNode)) return;
  if (now < away_until_ || !IsCutOff(*member, now) || member->heard - since < options_.silence) return;
  Refuse(member->worker, "the scheduler hears nothing from it on the data plane", actions);
}

void ControlMembers::Gone(WorkerId worker, const std::string& why, std::vector<MemberAction>& actions) {
  Remove(worker, why, /*dismissed=*/false, actions);
}
void ControlMembers::Refuse(WorkerId worker, const std::string& why, std::vector<MemberAction>& actions) {
  Remove(worker, why, /*dismissed=*/true, actions);
}

// One whose heartbeats were late lately, though it lives, may be twice as late the next time.
absl::Duration ControlMembers::PatienceWith(const Member& member) const {
  const absl::Duration busy = std::min(2 * member.lateness, options_.longest_starvation);
  if (member.suspected) return std::min(options_.lease, options_.suspect_lease) + busy;
  if (member.state != MemberState::kJoining) return options_.lease + busy;
  return member.request.model ? options_.upload_grace : std::max(options_.lease, options_.join_grace);
}

absl::Time ControlMembers::DeadlineOf(const Member& member) const {
  return std::max(member.heard + PatienceWith(member), member.excused);
}

absl::Time ControlMembers::NextDeadline() const {
  absl::Time deadline = absl::InfiniteFuture();
  for (const auto& [id, member] : members_) deadline = std::min(deadline, DeadlineOf(member));
  return deadline;
}

std::vector<WorkerId> ControlMembers::Overdue(absl::Time now) const {
  std::vector<WorkerId> overdue;
  for (const auto& [id, member] : members_)
    if (now >= DeadlineOf(member)) overdue.push_back(id);
  return overdue;
}

bool ControlMembers::Excuse(WorkerId worker, absl::Time now) {
  Member* member = Mutable(worker);
  if (member == nullptr) return false;
  const bool first = member->excused < member->heard;
  member->excused = std::min(now + options_.heartbeat, member->heard + options_.longest_starvation);
  return first;
}

void ControlMembers::Forgive(absl::Duration gap, absl::Time now) {
  away_until_ = now + std::min(options_.lease, options_.silence);
  for (auto& [id, member] : members_) member.heard += gap;
  bad_links_.Forgive(gap);
}

void ControlMembers::Expire(absl::Time now, std::vector<MemberAction>& actions) {
  std::vector<std::pair<WorkerId, std::string>> expired;
  for (const auto& [id, member] : members_) {
    if (now >= DeadlineOf(member))
      expired.emplace_back(id, absl::StrCat("silent for ", absl::ToInt64Milliseconds(DeadlineOf(member) - member.heard),
                                            " ms: stopped, or cut off"));
    else if (absl::Milliseconds(member.last.busy_ms) > options_.longest_turn)
      expired.emplace_back(id, absl::StrCat("stuck: its event loop has not turned for ", member.last.busy_ms, " ms"));
  }
  for (const auto& [worker, why] : expired) Remove(worker, why, /*dismissed=*/false, actions);
  JudgeLinks(now, actions);
  TellLinks(actions);
}

}  // namespace dovetail::scheduler
