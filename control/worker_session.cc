#include "control/worker_session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread_name.h"

namespace dovetail::control {
namespace {

constexpr absl::Duration kBetweenLooks = absl::Milliseconds(50);

bool WasDrained(const absl::Status& end) { return absl::IsAborted(end) && end.message() == "drained"; }

}  // namespace

MemberSession::MemberSession(MembershipClient& client, transport::Connector& connector,
                             std::unique_ptr<WorkerNode> node, std::string name)
    : client_(client), connector_(connector), node_(std::move(node)), name_(std::move(name)) {}

absl::Status MemberSession::Configure(const Configuration& configuration) {
  DT_ASSIGN_OR_RETURN(ready_, node_->Configure(configuration));
  return absl::OkStatus();
}

void MemberSession::Begin() {
  begun_ = true;
  client_.ReportReady(*ready_);
}

void MemberSession::Apply(const Peers& peers) {
  if (!begun_) return Fail(FailedPrecondition("the scheduler named peers before it configured this worker"));
  std::map<NodeId, Peer> wanted;
  for (const Peer& peer : peers.peers) wanted[peer.node] = peer;
  for (auto it = peers_.begin(); it != peers_.end();) {
    const auto still = wanted.find(it->first);
    if (still != wanted.end() && still->second == it->second) {
      ++it;
      continue;
    }
    node_->RemovePeer(it->second);
    connector_.RemovePeer(it->first);
    it = peers_.erase(it);
  }
  for (const auto& [id, peer] : wanted)
    if (!peers_.contains(id)) AddPeer(peer);
  if (!failure().ok()) return;
  Publish();
  version_ = peers.version;
  listed_.clear();
  for (const Peer& peer : peers.peers) listed_.push_back(peer.node);
  unconnected_ = Unconnected();
  reached_all_ = reached_all_ || unconnected_.empty();
  client_.ReportApplied({version_, unconnected_});
}

void MemberSession::AddPeer(const Peer& peer) {
  if (const absl::Status added = connector_.AddPeer(peer.node, peer.epoch, peer.address); !added.ok()) {
    const absl::Status why =
        Annotate(added, absl::StrCat("connecting to ", NameOf(peer.role), " ", peer.worker.value()));
    if (peer.role == Role::kScheduler) return Fail(absl::UnavailableError(why.message()));
    // It may have ended since; the scheduler decides which of the two must go.
    LogWarning(name_, ": ", std::string(why.message()));
    client_.ReportLinkFailed({peer.node, peer.epoch, std::string(why.message())});
    return;
  }
  peers_[peer.node] = peer;
  node_->AddPeer(peer);
  const std::string who = peer.role == Role::kScheduler
                              ? "the scheduler"
                              : absl::StrCat(NameOf(peer.role), " worker ", peer.worker.value());
  LogInfo(name_, " reaches ", who, " over ", connector_.LanesTo(peer.node));
}

std::vector<NodeId> MemberSession::Unconnected() const {
  std::vector<NodeId> unconnected;
  for (const NodeId node : listed_)
    if (!connector_.Connected(node)) unconnected.push_back(node);
  return unconnected;
}

void MemberSession::TellWhoConnected() {
  std::vector<NodeId> unconnected = Unconnected();
  if (unconnected == unconnected_) return;
  unconnected_ = std::move(unconnected);
  reached_all_ = reached_all_ || unconnected_.empty();
  client_.ReportApplied({version_, unconnected_});
}

// What the scheduler judges together with what it hears itself. Said again as long as it is so.
void MemberSession::TellWhoIsSuspect(bool idle) {
  const auto silent = connector_.SilentPeers();
  // A worker that hears no peer at all is itself cut off. It reports only its link to the scheduler, which ends this
  // incarnation.
  const bool deaf = silent.size() >= 2 && silent.size() == peers_.size();
  for (const transport::Connector::Silence& peer : silent) {
    if (deaf && peers_[peer.node].role != Role::kScheduler) continue;
    client_.ReportLinkFailed({peer.node, peer.epoch,
                              absl::StrCat("nothing came for ", absl::ToInt64Milliseconds(peer.length), " ms"),
                              LinkFailed::Kind::kSilent});
  }
  if (!idle || deaf) return;
  for (const NodeId node : node_->Overdue())
    if (const auto peer = peers_.find(node); peer != peers_.end())
      client_.ReportLinkFailed({node, peer->second.epoch, "its part of a step is overdue", LinkFailed::Kind::kLate});
}

int MemberSession::Turn() {
  if (!begun_) return 0;
  const int frames = node_->Poll();
  if (const absl::Status health = node_->Health(); !health.ok()) Fail(health);
  for (const transport::Connector::Failure& failure : connector_.TakeFailures()) {
    LogWarning(name_, ": node ", failure.node.value(), " cannot be reached: ", failure.why);
    client_.ReportLinkFailed({failure.node, failure.epoch, failure.why});
  }
  if (!unconnected_.empty()) TellWhoConnected();
  const absl::Time now = SystemClock().Now();
  if (now >= next_look_) {
    next_look_ = now + kBetweenLooks;
    Publish();
    TellWhoIsSuspect(frames == 0);
  }
  return frames;
}

void MemberSession::Publish() {
  Heartbeat heartbeat = node_->Status();
  for (const auto& [id, peer] : peers_) {
    const transport::Connector::Bytes bytes = connector_.BytesTo(id);
    heartbeat.links.push_back({id, connector_.LanesTo(id), bytes.messages, bytes.tensors, node_->ExchangeWith(id)});
  }
  MutexLock lock(mutex_);
  heartbeat_ = std::move(heartbeat);
}

Heartbeat MemberSession::heartbeat() const {
  MutexLock lock(mutex_);
  return heartbeat_;
}

absl::Status MemberSession::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void MemberSession::Fail(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (failure_.ok()) failure_ = status;
  }
  client_.Stop();
}

namespace {

std::vector<std::unique_ptr<MemberSession>> SessionsOf(std::vector<WorkerSession::Member>& members) {
  std::vector<std::unique_ptr<MemberSession>> sessions;
  for (WorkerSession::Member& member : members)
    sessions.push_back(std::make_unique<MemberSession>(*member.client, *member.connector, std::move(member.node),
                                                       std::move(member.name)));
  return sessions;
}

}  // namespace

WorkerSession::WorkerSession(std::vector<Member> members)
    : members_(SessionsOf(members)),
      busiest_(members.size()),
      loop_(*members.front().connector, members.size() > 1 ? members[1].connector : nullptr) {}

absl::Status WorkerSession::Run() {
  std::vector<std::thread> others;
  for (size_t i = 1; i < members_.size(); ++i)
    others.emplace_back([this, i] {
      NameThread("dt-membership");
      Attend(i);
    });
  Attend(0);
  for (std::thread& other : others) other.join();
  loop_.Stop();
  MutexLock lock(mutex_);
  return *end_;
}

// Until this membership has ended. The first one to end takes the others with it.
void WorkerSession::Attend(size_t index) {
  MemberSession& member = *members_[index];
  MembershipClient::Handlers handlers;
  handlers.on_configuration = [this, index](const Configuration& configuration) { Configure(index, configuration); };
  handlers.on_peers = [this, &member](Peers peers) {
    loop_.Post([&member, peers = std::move(peers)] { member.Apply(peers); });
  };
  handlers.heartbeat = [this, &member, index] {
    Heartbeat heartbeat = member.heartbeat();
    heartbeat.busy_ms = static_cast<uint32_t>(absl::ToInt64Milliseconds(TakeBusiest(index)));
    return heartbeat;
  };
  absl::Status end = member.client().Run(handlers);
  if (const absl::Status failure = member.failure(); !failure.ok()) end = failure;
  {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    end_ = end;
  }
  changed_.notify_all();
  if (WasDrained(end)) return;  // the scheduler drains the others next
  for (size_t i = 0; i < members_.size(); ++i)
    if (i != index) members_[i]->client().Leave();
}

// In the order of the list: what one node has of a device's memory is known before the next one takes the rest.
void WorkerSession::Configure(size_t index, const Configuration& configuration) {
  {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return configured_ == index || end_; });
    if (end_) return;
  }
  if (const absl::Status status = members_[index]->Configure(configuration); !status.ok())
    return members_[index]->Fail(status);
  bool all = false;
  {
    MutexLock lock(mutex_);
    all = ++configured_ == members_.size();
  }
  changed_.notify_all();
  if (all) loop_.Call([this] { Begin(); });
}

void WorkerSession::Begin() {
  for (const auto& member : members_) member->Begin();
  loop_.SetNode({[this] { return Turn(); }, [this] { return NextTurn(); }});
}

int WorkerSession::Turn() {
  int frames = 0;
  for (const auto& member : members_) frames += member->Turn();
  return frames;
}

absl::Time WorkerSession::NextTurn() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& member : members_) next = std::min(next, member->next_turn());
  return next;
}

// Each member tells of each turn.
absl::Duration WorkerSession::TakeBusiest(size_t index) {
  MutexLock lock(mutex_);
  const absl::Duration busiest = loop_.TakeBusiest();
  for (absl::Duration& of_member : busiest_) of_member = std::max(of_member, busiest);
  return std::exchange(busiest_[index], absl::ZeroDuration());
}

bool WorkerSession::WasInVain() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& member) { return member->WasInVain(); });
}

bool WorkerSession::Served() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& member) { return member->Served(); });
}

}  // namespace dovetail::control
