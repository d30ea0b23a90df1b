#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "control/membership_client.h"
#include "control/worker_node.h"
#include "transport/connector.h"

namespace dovetail::control {

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
  // A pair: the process has a compute worker, as above, and this attention worker. Both are members, with one event
  // loop; frames between them go through memory.
  struct Attention {
    std::string name;
    Capabilities capabilities;
  };
  std::optional<Attention> attention;
};

// A worker process: joins, serves, and joins anew as another incarnation whenever its membership ends, until it is
// stopped, drained, or refused for good. Each incarnation has a connector, a node id and an epoch of its own: nothing
// that was sent to a former one reaches it.
// Threads: one thread constructs it and calls Run(); Stop() is thread-safe.
class WorkerMain {
 public:
  using ConnectorFactory = std::function<absl::StatusOr<std::unique_ptr<transport::Connector>>(NodeId, Epoch)>;
  using NodeFactory = std::function<std::unique_ptr<WorkerNode>(transport::Connector&, const JoinReply&)>;
  // Of a pair: of the compute worker, and then of the attention worker.
  struct Joined {
    transport::Connector& connector;
    JoinReply membership;
  };
  using Nodes = std::vector<std::unique_ptr<WorkerNode>>;
  using PairFactory = std::function<absl::StatusOr<Nodes>(const Joined&, const Joined&)>;

  WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, NodeFactory make_node);
  // Requires: options.attention.
  WorkerMain(WorkerMainOptions options, ConnectorFactory make_connector, PairFactory make_pair);

  // Blocks. kOk: stopped or drained. Otherwise one line: what is wrong and the remedy.
  absl::Status Run();

  // Thread-safe: leaves the cluster and ends Run().
  void Stop();

 private:
  // One incarnation's way into the cluster.
  struct Way {
    std::unique_ptr<transport::Connector> connector;
    std::unique_ptr<MembershipClient> client;  // destroyed first
  };
  absl::StatusOr<std::vector<std::unique_ptr<transport::Connector>>> MakeConnectors();
  absl::StatusOr<std::vector<Way>> JoinOnce();
  absl::StatusOr<std::vector<Way>> JoinPatiently();
  JoinRequest RequestOf(size_t index, const transport::Connector& connector) const;
  absl::StatusOr<Nodes> MakeNodes(const std::vector<Way>& ways);
  absl::Status Serve(const std::vector<Way>& ways, bool& in_vain);
  absl::Duration PatienceWith(const absl::Status& refusal) const;
  void Pause(absl::Duration length);
  absl::Status Drained() const;

  const WorkerMainOptions options_;
  const uint64_t process_;  // tells this process from another of its name, whatever its node and epoch
  const HostProcess runs_as_;
  const ConnectorFactory make_connector_;
  const NodeFactory make_node_;
  const PairFactory make_pair_;
  Mutex mutex_;
  std::vector<MembershipClient*> clients_ ABSL_GUARDED_BY(mutex_);  // while Serve runs
  std::vector<Epoch> epochs_;                                       // of the connectors that were made last
  bool was_member_ = false;
  bool served_ = false;  // as a member, at some time
  CondVar wake_;
  std::atomic<bool> stopping_{false};
};

// Bytes per second that one core reads from memory: what attention is bound by. Takes about 20 ms.
// Threads: thread-safe; measures on the calling thread.
uint64_t MeasureMemoryBandwidth();

}  // namespace dovetail::control
