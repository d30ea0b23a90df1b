#include "control/worker_main.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "proto/frame.h"

namespace dovetail::control {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(200);
constexpr absl::Duration kNamePatience = absl::Seconds(2);

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
      std::lock_guard<std::mutex> lock(mutex_);
      return heartbeat_;
    };
    const absl::Status end = client_.Run(handlers);
    loop_.Stop();
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_.ok() ? end : failure_;
  }

 private:
  void Configure(const Configuration& configuration) {
    const auto blocks = node_->Configure(configuration);
    if (!blocks.ok()) return Fail(blocks.status());
    loop_.Call([this] {
      configured_ = true;
      loop_.SetNode({[this] { return Turn(); }, {}});
    });
    client_.ReportReady(*blocks);
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
      if (const absl::Status added = connector_.AddPeer(id, peer.epoch, peer.address); !added.ok())
        return Fail(Annotate(added, absl::StrCat("connecting to ", NameOf(peer.role), " ", peer.worker.value())));
      peers_[id] = peer;
      node_->AddPeer(peer);
      const std::string who = peer.role == Role::kScheduler
                                  ? "the scheduler"
                                  : absl::StrCat(NameOf(peer.role), " worker ", peer.worker.value());
      LogInfo(name_, " reaches ", who, " over ", connector_.LanesTo(id));
    }
    Publish();
    client_.ReportApplied(peers.version);
  }

  int Turn() {
    const int frames = node_->Poll();
    for (const transport::Connector::Failure& failure : connector_.TakeFailures()) {
      LogWarning(name_, ": node ", failure.node.value(), " cannot be reached: ", failure.why);
      client_.ReportLinkFailed({failure.node, failure.epoch, failure.why});
    }
    const absl::Time now = SystemClock().Now();
    if (now >= next_publish_) {
      next_publish_ = now + absl::Milliseconds(50);
      Publish();
    }
    return frames;
  }

  void Publish() {
    Heartbeat heartbeat = node_->Status();
    for (const auto& [id, peer] : peers_) heartbeat.links.push_back({id, connector_.LanesTo(id)});
    std::lock_guard<std::mutex> lock(mutex_);
    heartbeat_ = std::move(heartbeat);
  }

  void Fail(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.ok()) failure_ = status;
    }
    client_.Stop();
  }

  MembershipClient& client_;
  transport::Connector& connector_;
  const std::unique_ptr<WorkerNode> node_;
  const std::string name_;
  std::map<NodeId, Peer> peers_;  // on the loop
  absl::Time next_publish_;
  bool configured_ = false;  // on the loop
  std::mutex mutex_;         // of what follows
  Heartbeat heartbeat_;
  absl::Status failure_;
  NodeLoop loop_;  // last: its thread uses the rest
};

uint32_t RandomId(std::random_device& random) {
  return std::uniform_int_distribution<uint32_t>(1, std::numeric_limits<uint32_t>::max() - 1)(random);
}

}  // namespace

WorkerMain::WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, NodeFactory make_node)
    : options_(std::move(options)), make_connector_(std::move(make_connector)), make_node_(std::move(make_node)) {}

// The scheduler may start later than its workers. Refusals are final, but for the name of this worker's own former
// incarnation.
absl::StatusOr<std::unique_ptr<MembershipClient>> WorkerMain::JoinPatiently(
    std::unique_ptr<transport::Connector>& connector) {
  std::random_device random;
  const absl::Time begun = SystemClock().Now();
  bool said = false;
  while (true) {
    const NodeId node(RandomId(random));
    const Epoch epoch(RandomId(random));
    connector.reset();
    DT_ASSIGN_OR_RETURN(connector, make_connector_(node, epoch));
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
                               options_.model};
    auto client = MembershipClient::Join(join);
    if (client.ok() || stopping_) return client;
    // The name of a former incarnation is free when its lease has run out.
    absl::Duration patience = absl::ZeroDuration();
    if (absl::IsUnavailable(client.status())) patience = options_.join_timeout;
    if (absl::IsAlreadyExists(client.status())) patience = std::min(options_.join_timeout, kNamePatience);
    if (SystemClock().Now() - begun >= patience) return client.status();
    if (!said)
      LogWarning(options_.name, ": ", std::string(client.status().message()), "; trying for ",
                 absl::FormatDuration(patience));
    said = true;
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, absl::ToChronoMilliseconds(kRetryPause), [this] { return stopping_.load(); });
    if (stopping_) return absl::CancelledError("stopped");
  }
}

absl::Status WorkerMain::Serve(MembershipClient& client, transport::Connector& connector) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return absl::OkStatus();
    client_ = &client;
  }
  LogInfo(options_.name, " is ", NameOf(options_.role), " worker ", client.membership().worker.value(), " of ",
          options_.scheduler);
  const absl::Status end = Session(client, connector, make_node_(connector, client.membership()), options_.name).Run();
  std::lock_guard<std::mutex> lock(mutex_);
  client_ = nullptr;
  return end;
}

absl::Status WorkerMain::Run() {
  while (true) {
    std::unique_ptr<transport::Connector> connector;
    auto client = JoinPatiently(connector);
    if (stopping_) return absl::OkStatus();
    if (!client.ok()) return client.status();
    const absl::Status end = Serve(**client, *connector);
    if (stopping_) return absl::OkStatus();
    client->reset();
    if (absl::IsAborted(end) && end.message() == "drained") {
      LogInfo(options_.name, " was drained");
      return absl::OkStatus();
    }
    if (!absl::IsUnavailable(end) && !absl::IsAborted(end)) return end;
    LogWarning(options_.name, ": ", std::string(end.message()), "; joining again");
  }
}

void WorkerMain::Stop() {
  MembershipClient* client = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
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
