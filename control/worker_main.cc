#include "control/worker_main.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "proto/frame.h"

namespace dovetail::control {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// With a name or a place that its own former incarnation may still have: of a worker that is new, and of one that was a
// member, whose lease is longer on a busy machine.
constexpr absl::Duration kNamePatience = absl::Seconds(2);
constexpr absl::Duration kOwnNamePatience = absl::Seconds(30);
constexpr absl::Duration kBetweenLooks = absl::Milliseconds(50);
// A membership that ends this soon is not followed by another one at once.
constexpr absl::Duration kShortMembership = absl::Seconds(1);
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);

// One incarnation's life between joining and its end.
class Session {
 public:
  Session(MembershipClient& client, transport::Connector& connector, std::unique_ptr<WorkerNode> node,
          const std::string& name)
      : client_(client), connector_(connector), node_(std::move(node)), name_(name), loop_(connector) {}

  absl::Status Run() {
    MembershipClient::Handlers handlers;
    handlers.on_configuration = [this](const Configuration& configuration) { Configure(configuration); };
    handlers.on_peers = [this](Peers peers) { loop_.Post([this, peers = std::move(peers)] { Apply(peers); }); };
    handlers.heartbeat = [this] {
      MutexLock lock(mutex_);
      Heartbeat heartbeat = heartbeat_;
      heartbeat.busy_ms = static_cast<uint32_t>(absl::ToInt64Milliseconds(loop_.TakeBusiest()));
      return heartbeat;
    };
    const absl::Status end = client_.Run(handlers);
    loop_.Stop();
    MutexLock lock(mutex_);
    return failure_.ok() ? end : failure_;
  }

  // After Run(): the worker could not do what it joined for. A worker that reached all of its peers and was fenced
  // later, for example because its process was stopped, did not join in vain.
  bool WasInVain() const {
    MutexLock lock(mutex_);
    return !failure_.ok() || (!listed_.empty() && !reached_all_);
  }
  bool Served() const { return !listed_.empty() && reached_all_; }

 private:
  void Configure(const Configuration& configuration) {
    const auto blocks = node_->Configure(configuration);
    if (!blocks.ok()) return Fail(blocks.status());
    loop_.Call([this] {
      configured_ = true;
      loop_.SetNode({[this] { return Turn(); }, [this] { return next_look_; }});
    });
    client_.ReportReady(*blocks, node_->LeavesStates());
  }

  // On the loop: what the scheduler says replaces what was said before.
  void Apply(const Peers& peers) {
    if (!configured_) return Fail(FailedPrecondition("the scheduler named peers before it configured this worker"));
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
    for (const auto& [id, peer] : wanted) {
      if (peers_.contains(id)) continue;
      if (const absl::Status added = connector_.AddPeer(id, peer.epoch, peer.address); !added.ok()) {
        const absl::Status why =
            Annotate(added, absl::StrCat("connecting to ", NameOf(peer.role), " ", peer.worker.value()));
        if (peer.role == Role::kScheduler) return Fail(absl::UnavailableError(why.message()));
        // It may have ended since; the scheduler decides which of the two must go.
        LogWarning(name_, ": ", std::string(why.message()));
        client_.ReportLinkFailed({id, peer.epoch, std::string(why.message())});
        continue;
      }
      peers_[id] = peer;
      node_->AddPeer(peer);
      const std::string who = peer.role == Role::kScheduler
                                  ? "the scheduler"
                                  : absl::StrCat(NameOf(peer.role), " worker ", peer.worker.value());
      LogInfo(name_, " reaches ", who, " over ", connector_.LanesTo(id));
    }
    Publish();
    version_ = peers.version;
    listed_.clear();
    for (const Peer& peer : peers.peers) listed_.push_back(peer.node);
    unconnected_ = Unconnected();
    reached_all_ = reached_all_ || unconnected_.empty();
    client_.ReportApplied({version_, unconnected_});
  }

  std::vector<NodeId> Unconnected() const {
    std::vector<NodeId> unconnected;
    for (const NodeId node : listed_)
      if (!connector_.Connected(node)) unconnected.push_back(node);
    return unconnected;
  }

  void TellWhoConnected() {
    std::vector<NodeId> unconnected = Unconnected();
    if (unconnected == unconnected_) return;
    unconnected_ = std::move(unconnected);
    reached_all_ = reached_all_ || unconnected_.empty();
    client_.ReportApplied({version_, unconnected_});
  }

  // What the scheduler judges together with what it hears itself. Said again as long as it is so.
  void TellWhoIsSuspect(bool idle) {
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

  int Turn() {
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

  void Publish() {
    Heartbeat heartbeat = node_->Status();
    for (const auto& [id, peer] : peers_) {
      const transport::Connector::Bytes bytes = connector_.BytesTo(id);
      heartbeat.links.push_back({id, connector_.LanesTo(id), bytes.messages, bytes.tensors, node_->ExchangeWith(id)});
    }
    MutexLock lock(mutex_);
    heartbeat_ = std::move(heartbeat);
  }

  void Fail(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      if (failure_.ok()) failure_ = status;
    }
    client_.Stop();
  }

  MembershipClient& client_;
  transport::Connector& connector_;
  const std::unique_ptr<WorkerNode> node_;
  const std::string name_;
  // On the loop.
  std::map<NodeId, Peer> peers_;
  uint64_t version_ = 0;             // of the peers
  std::vector<NodeId> listed_;       // by the scheduler
  std::vector<NodeId> unconnected_;  // as last told
  bool reached_all_ = false;         // at some time
  absl::Time next_look_ = absl::InfinitePast();
  bool configured_ = false;
  mutable Mutex mutex_;
  Heartbeat heartbeat_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  NodeLoop loop_;  // last: its thread uses the rest
};

uint32_t RandomId(std::random_device& random) {
  return std::uniform_int_distribution<uint32_t>(1, std::numeric_limits<uint32_t>::max() - 1)(random);
}

// Blocks are accounted for before they are allocated: what cannot be there must not be asked for.
absl::Status CheckCapacity(const Capabilities& has) {
  const auto pages = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  const uint64_t machine = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (has.device != "cpu" || has.kv_bytes <= machine) return absl::OkStatus();
  return InvalidArgument("--kv-capacity: ", has.kv_bytes, " bytes are more than the ", machine,
                         " bytes of memory of this machine; leave some of those to others");
}

uint64_t RandomProcess() {
  std::random_device random;
  return uint64_t{RandomId(random)} << 32 | RandomId(random);
}

}  // namespace

WorkerMain::WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, NodeFactory make_node)
    : options_(std::move(options)),
      process_(RandomProcess()),
      runs_as_(ThisProcess()),
      make_connector_(std::move(make_connector)),
      make_node_(std::move(make_node)) {}

absl::StatusOr<std::unique_ptr<MembershipClient>> WorkerMain::JoinOnce(
    std::unique_ptr<transport::Connector>& connector) {
  std::random_device random;
  const NodeId node(RandomId(random));
  const Epoch epoch(RandomId(random));
  connector.reset();
  auto made = make_connector_(node, epoch);
  // A device whose cable is out is none to UCX. If this host had it before, it will have it again.
  if (!made.ok()) return was_member_ ? absl::UnavailableError(made.status().message()) : made.status();
  connector = *std::move(made);
  MembershipClient::Options join;
  join.scheduler = options_.scheduler;
  join.security = options_.security;
  join.files = options_.files;
  join.request = JoinRequest{options_.role,
                             options_.name,
                             node,
                             epoch,
                             kBuildVersion,
                             proto::kFrameVersion,
                             connector->version(),
                             connector->address(),
                             options_.capabilities,
                             options_.model,
                             process_,
                             runs_as_};
  auto client = MembershipClient::Join(join);
  was_member_ = was_member_ || client.ok();
  return client;
}

// How long to try again after such an end of JoinOnce(). Refusals are final, except for what this worker's own former
// incarnation takes until its lease has run out: its name, and its place in a full cluster.
absl::Duration WorkerMain::PatienceWith(const absl::Status& refusal) const {
  if (absl::IsUnavailable(refusal)) return was_member_ ? absl::InfiniteDuration() : options_.join_timeout;
  if (absl::IsAlreadyExists(refusal) || absl::IsResourceExhausted(refusal))
    return was_member_ ? kOwnNamePatience : std::min(options_.join_timeout, kNamePatience);
  return absl::ZeroDuration();
}

// The scheduler may start later than its workers, or end and be started again.
absl::StatusOr<std::unique_ptr<MembershipClient>> WorkerMain::JoinPatiently(
    std::unique_ptr<transport::Connector>& connector) {
  absl::Time since = SystemClock().Now();
  absl::StatusCode last = absl::StatusCode::kOk;
  bool said = false;
  while (true) {
    auto client = JoinOnce(connector);
    if (client.ok() || stopping_) return client;
    const absl::Duration patience = PatienceWith(client.status());
    const absl::Time now = SystemClock().Now();
    // A scheduler that could not be reached for long may then have this worker's former incarnation for a moment.
    if (last != absl::StatusCode::kOk && last != client.status().code()) {
      since = now;
      said = false;
    }
    last = client.status().code();
    if (now - since >= patience) return client.status();
    if (!said)
      LogWarning(options_.name, ": ", std::string(client.status().message()), "; trying ",
                 patience == absl::InfiniteDuration() ? "until it is back" : "for " + absl::FormatDuration(patience));
    said = true;
    Pause(kRetryPause);
    if (stopping_) return absl::CancelledError("stopped");
  }
}

absl::Status WorkerMain::Serve(MembershipClient& client, transport::Connector& connector, bool& in_vain) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return absl::OkStatus();
    client_ = &client;
  }
  LogInfo(options_.name, " is ", NameOf(options_.role), " worker ", client.membership().worker.value(), " of ",
          options_.scheduler, "; data plane: ", connector.listening());
  Session session(client, connector, make_node_(connector, client.membership()), options_.name);
  const absl::Status end = session.Run();
  in_vain = session.WasInVain();
  served_ = served_ || session.Served();
  MutexLock lock(mutex_);
  client_ = nullptr;
  return end;
}

void WorkerMain::Pause(absl::Duration length) {
  MutexLock lock(mutex_);
  wake_.wait_for(lock, absl::ToChronoMilliseconds(length), [this] { return stopping_.load(); });
}

absl::Status WorkerMain::Drained() const {
  LogInfo(options_.name, " was drained");
  return absl::OkStatus();
}

absl::Status WorkerMain::Run() {
  DT_RETURN_IF_ERROR(CheckCapacity(options_.capabilities));
  absl::Duration pause = kFirstPause;
  absl::Time in_vain_since = SystemClock().Now();
  while (true) {
    std::unique_ptr<transport::Connector> connector;
    auto client = JoinPatiently(connector);
    if (stopping_) return absl::OkStatus();
    // The scheduler remembers which workers it drained, since the dismissal may have been lost with the connection.
    if (absl::IsAborted(client.status())) return Drained();
    if (!client.ok()) return client.status();
    const absl::Time begun = SystemClock().Now();
    bool in_vain = false;
    const absl::Status end = Serve(**client, *connector, in_vain);
    if (stopping_) return absl::OkStatus();
    client->reset();
    if (absl::IsAborted(end) && end.message() == "drained") return Drained();
    if (!absl::IsUnavailable(end) && !absl::IsAborted(end)) return end;
    LogWarning(options_.name, ": ", std::string(end.message()), "; joining again");
    const absl::Time now = SystemClock().Now();
    if (!in_vain || now - begun > kShortMembership) in_vain_since = now;
    if (now - begun > kShortMembership) {
      pause = kFirstPause;
      continue;
    }
    if (!served_ && now - in_vain_since > options_.join_timeout) return end;
    connector.reset();
    Pause(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void WorkerMain::Stop() {
  MembershipClient* client = nullptr;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    client = client_;
    if (client != nullptr) client->Leave();
  }
  wake_.notify_all();
}

uint64_t MeasureMemoryBandwidth() {
  std::vector<uint64_t> memory((size_t{32} << 20) / sizeof(uint64_t), 1);
  uint64_t sum = 0;
  const absl::Time begun = SystemClock().Now();
  int passes = 0;
  do {
    sum += std::accumulate(memory.begin(), memory.end(), uint64_t{0});
    ++passes;
  } while (SystemClock().Now() - begun < absl::Milliseconds(20));
  const double seconds = absl::ToDoubleSeconds(SystemClock().Now() - begun);
  const double bytes = static_cast<double>(memory.size()) * sizeof(uint64_t) * passes;
  return sum == 0 ? 0 : static_cast<uint64_t>(bytes / seconds);
}

}  // namespace dovetail::control
