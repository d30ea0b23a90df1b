#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "control/membership_client.h"
#include "control/node_loop.h"
#include "transport/connector.h"

namespace dovetail::control {

// What a role does with its membership. One object is one incarnation.
// Threads: reactor-owned, except Configure(): another thread calls it before the loop uses the node.
class WorkerNode {
 public:
  virtual ~WorkerNode() = default;
  // Allocates for the model; blocks. The KV blocks it has (0 for a compute worker). Called once, before anything else,
  // on another thread while the loop does not use the node.
  virtual absl::StatusOr<uint64_t> Configure(const Configuration& configuration) = 0;
  // Whether linear layers of prompts run there, so that of their states it leaves proto::StatesLeft. After Configure().
  virtual bool LeavesStates() const { return false; }
  virtual void AddPeer(const Peer& peer) = 0;     // after the connector knows it
  virtual void RemovePeer(const Peer& peer) = 0;  // before the connector forgets it
  virtual int Poll() = 0;                         // frames handled
  // Peers whose part of a step is overdue. Asked when Poll() found nothing.
  virtual std::vector<NodeId> Overdue() { return {}; }
  virtual Heartbeat Status() const = 0;
  // Not kOk: this process cannot go on, for this reason. Asked after each Poll().
  virtual absl::Status Health() const { return absl::OkStatus(); }
  // How layers cross to this peer: as Link::exchange.
  virtual std::string ExchangeWith(NodeId) const { return {}; }
};

struct WorkerMainOptions {
  std::string scheduler;  // HOST:PORT
  Security security;
  Role role = Role::kAttentionWorker;
  std::string name;
  Capabilities capabilities;
  std::optional<ModelSummary> model;  // of a compute worker
  std::vector<TextFile> files;
  // How long a scheduler that cannot be reached is tried, and one that lets this worker join but not serve. A worker
  // that was a member tries without limit: it keeps what took it long to load.
  absl::Duration join_timeout = absl::Seconds(30);
};

// A worker process: joins, serves, and joins anew as another incarnation whenever its membership ends, until it is
// stopped, drained, or refused for good. Each incarnation has a connector, a node id and an epoch of its own: nothing
// that was sent to a former one reaches it.
// Threads: one thread constructs it and calls Run(); Stop() is thread-safe.
class WorkerMain {
 public:
  using ConnectorFactory = std::function<absl::StatusOr<std::unique_ptr<transport::Connector>>(NodeId, Epoch)>;
  using NodeFactory = std::function<std::unique_ptr<WorkerNode>(transport::Connector&, const JoinReply&)>;

  WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, NodeFactory make_node);

  // Blocks. kOk: stopped or drained. Otherwise one line: what is wrong and the remedy.
  absl::Status Run();

  // Thread-safe: leaves the cluster and ends Run().
  void Stop();

 private:
  absl::StatusOr<std::unique_ptr<MembershipClient>> JoinOnce(std::unique_ptr<transport::Connector>& connector);
  absl::StatusOr<std::unique_ptr<MembershipClient>> JoinPatiently(std::unique_ptr<transport::Connector>& connector);
  absl::Status Serve(MembershipClient& client, transport::Connector& connector, bool& in_vain);
  absl::Duration PatienceWith(const absl::Status& refusal) const;
  void Pause(absl::Duration length);
  absl::Status Drained() const;

  const WorkerMainOptions options_;
  const uint64_t process_;  // tells this process from another of its name, whatever its node and epoch
  const HostProcess runs_as_;
  const ConnectorFactory make_connector_;
  const NodeFactory make_node_;
  Mutex mutex_;
  MembershipClient* client_ ABSL_GUARDED_BY(mutex_) = nullptr;  // while Serve runs
  bool was_member_ = false;
  bool served_ = false;  // as a member, at some time
  CondVar wake_;
  std::atomic<bool> stopping_{false};
};

// Bytes per second that one core reads from memory: what attention is bound by. Takes about 20 ms.
// Threads: thread-safe; measures on the calling thread.
uint64_t MeasureMemoryBandwidth();

}  // namespace dovetail::control
