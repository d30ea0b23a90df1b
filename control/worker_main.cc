#include "control/worker_main.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "control/worker_session.h"
#include "proto/frame.h"
#include "transport/inproc/local_connector.h"

namespace dovetail::control {
namespace {

constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// With a name or a place that its own former incarnation may still have: of a worker that is new, and of one that was a
// member, whose lease is longer on a busy machine.
constexpr absl::Duration kNamePatience = absl::Seconds(2);
constexpr absl::Duration kOwnNamePatience = absl::Seconds(30);
// A membership that ends this soon is not followed by another one at once.
constexpr absl::Duration kShortMembership = absl::Seconds(1);
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);

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

WorkerMain::WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, PairFactory make_pair)
    : options_(std::move(options)),
      process_(RandomProcess()),
      runs_as_(ThisProcess()),
      make_connector_(std::move(make_connector)),
      make_pair_(std::move(make_pair)) {}

// Each with a node and an epoch of its own.
absl::StatusOr<std::vector<std::unique_ptr<transport::Connector>>> WorkerMain::MakeConnectors() {
  std::vector<std::unique_ptr<transport::Connector>> connectors;
  std::random_device random;
  epochs_.clear();
  for (size_t i = 0; i < (options_.attention ? 2 : 1); ++i) {
    const NodeId node(RandomId(random));
    epochs_.emplace_back(RandomId(random));
    auto made = make_connector_(node, epochs_.back());
    // A device whose cable is out is none to UCX. If this host had it before, it will have it again.
    if (!made.ok()) return was_member_ ? absl::UnavailableError(made.status().message()) : made.status();
    connectors.push_back(*std::move(made));
  }
  if (connectors.size() < 2) return connectors;
  auto [one, other] = transport::LocalConnector::Link(std::move(connectors[0]), std::move(connectors[1]));
  connectors[0] = std::move(one);
  connectors[1] = std::move(other);
  return connectors;
}

JoinRequest WorkerMain::RequestOf(size_t index, const transport::Connector& connector) const {
  const bool first = index == 0;
  return JoinRequest{first ? options_.role : Role::kAttentionWorker,
                     first ? options_.name : options_.attention->name,
                     connector.id(),
                     epochs_[index],
                     kBuildVersion,
                     proto::kFrameVersion,
                     connector.version(),
                     connector.address(),
                     first ? options_.capabilities : options_.attention->capabilities,
                     first ? options_.model : std::nullopt,
                     process_,
                     runs_as_};
}

absl::StatusOr<std::vector<WorkerMain::Way>> WorkerMain::JoinOnce() {
  DT_ASSIGN_OR_RETURN(auto connectors, MakeConnectors());
  std::vector<Way> ways;
  for (size_t i = 0; i < connectors.size(); ++i) {
    MembershipClient::Options join;
    join.scheduler = options_.scheduler;
    join.security = options_.security;
    if (i == 0) join.files = options_.files;
    join.request = RequestOf(i, *connectors[i]);
    DT_ASSIGN_OR_RETURN(auto client, MembershipClient::Join(join));
    ways.push_back({std::move(connectors[i]), std::move(client)});
  }
  was_member_ = true;
  return ways;
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
absl::StatusOr<std::vector<WorkerMain::Way>> WorkerMain::JoinPatiently() {
  absl::Time since = SystemClock().Now();
  absl::StatusCode last = absl::StatusCode::kOk;
  bool said = false;
  while (true) {
    auto ways = JoinOnce();
    if (ways.ok() || stopping_) return ways;
    const absl::Duration patience = PatienceWith(ways.status());
    const absl::Time now = SystemClock().Now();
    // A scheduler that could not be reached for long may then have this worker's former incarnation for a moment.
    if (last != absl::StatusCode::kOk && last != ways.status().code()) {
      since = now;
      said = false;
    }
    last = ways.status().code();
    if (now - since >= patience) return ways.status();
    if (!said)
      LogWarning(options_.name, ": ", std::string(ways.status().message()), "; trying ",
                 patience == absl::InfiniteDuration() ? "until it is back" : "for " + absl::FormatDuration(patience));
    said = true;
    Pause(kRetryPause);
    if (stopping_) return absl::CancelledError("stopped");
  }
}

absl::StatusOr<WorkerMain::Nodes> WorkerMain::MakeNodes(const std::vector<Way>& ways) {
  const auto joined = [&](size_t i) { return Joined{*ways[i].connector, ways[i].client->membership()}; };
  if (make_pair_ != nullptr) return make_pair_(joined(0), joined(1));
  Nodes nodes;
  nodes.push_back(make_node_(*ways[0].connector, ways[0].client->membership()));
  return nodes;
}

absl::Status WorkerMain::Serve(const std::vector<Way>& ways, bool& in_vain) {
  DT_ASSIGN_OR_RETURN(Nodes nodes, MakeNodes(ways));
  {
    MutexLock lock(mutex_);
    if (stopping_) return absl::OkStatus();
    for (const Way& way : ways) clients_.push_back(way.client.get());
  }
  std::vector<WorkerSession::Member> members;
  for (size_t i = 0; i < ways.size(); ++i) {
    const bool first = i == 0;
    const std::string& name = first ? options_.name : options_.attention->name;
    LogInfo(name, " is ", NameOf(first ? options_.role : Role::kAttentionWorker), " worker ",
            ways[i].client->membership().worker.value(), " of ", options_.scheduler,
            "; data plane: ", ways[i].connector->listening());
    members.push_back({ways[i].client.get(), ways[i].connector.get(), std::move(nodes[i]), name});
  }
  WorkerSession session(std::move(members));
  const absl::Status end = session.Run();
  in_vain = session.WasInVain();
  served_ = served_ || session.Served();
  MutexLock lock(mutex_);
  clients_.clear();
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
  DT_RETURN_IF_ERROR(CheckCapacity(options_.attention ? options_.attention->capabilities : options_.capabilities));
  absl::Duration pause = kFirstPause;
  absl::Time in_vain_since = SystemClock().Now();
  while (true) {
    auto ways = JoinPatiently();
    if (stopping_) return absl::OkStatus();
    // The scheduler remembers which workers it drained, since the dismissal may have been lost with the connection.
    if (absl::IsAborted(ways.status())) return Drained();
    if (!ways.ok()) return ways.status();
    const absl::Time begun = SystemClock().Now();
    bool in_vain = false;
    const absl::Status end = Serve(*ways, in_vain);
    if (stopping_) return absl::OkStatus();
    for (Way& way : *ways) way.client.reset();
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
    ways->clear();
    Pause(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void WorkerMain::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (MembershipClient* client : clients_) client->Leave();
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
