#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "control/membership_client.h"
#include "control/node_loop.h"
#include "control/worker_node.h"
#include "transport/connector.h"

namespace dovetail::control {

// One member of the cluster between joining and its end: it applies what the scheduler says about peers to a node and
// its connector, and tells the scheduler what these report.
// Threads: reactor-owned by the session's loop, except where it says otherwise.
class MemberSession {
 public:
  // `client` and `connector` outlive it. `name`: of the worker, for the log.
  MemberSession(MembershipClient& client, transport::Connector& connector, std::unique_ptr<WorkerNode> node,
                std::string name);

  // Not on the loop, which does not use the node yet. Allocates; blocks. What it is ready with is kept for Begin().
  // Errors: those of WorkerNode::Configure().
  absl::Status Configure(const Configuration& configuration);
  // On the loop, once all members of the session are configured.
  void Begin();
  void Apply(const Peers& peers);  // what the scheduler says replaces what was said before
  int Turn();                      // 0: there was nothing to do
  absl::Time next_turn() const { return next_look_; }

  // Thread-safe. The member cannot go on, for this reason: its membership ends.
  void Fail(const absl::Status& status);
  absl::Status failure() const;  // thread-safe
  Heartbeat heartbeat() const;   // thread-safe: as last published by the loop
  MembershipClient& client() { return client_; }

  // After the loop has ended. The worker could not do what it joined for. A worker that reached all of its peers and
  // was fenced later, for example because its process was stopped, did not join in vain.
  bool WasInVain() const { return !failure().ok() || (!listed_.empty() && !reached_all_); }
  bool Served() const { return !listed_.empty() && reached_all_; }

 private:
  std::vector<NodeId> Unconnected() const;
  void AddPeer(const Peer& peer);
  void TellWhoConnected();
  void TellWhoIsSuspect(bool idle);
  void Publish();

  MembershipClient& client_;
  transport::Connector& connector_;
  const std::unique_ptr<WorkerNode> node_;
  const std::string name_;
  std::optional<Ready> ready_;  // once it is configured
  bool begun_ = false;
  std::map<NodeId, Peer> peers_;
  uint64_t version_ = 0;             // of the peers
  std::vector<NodeId> listed_;       // by the scheduler
  std::vector<NodeId> unconnected_;  // as last told
  bool reached_all_ = false;         // at some time
  absl::Time next_look_ = absl::InfinitePast();
  mutable Mutex mutex_;
  Heartbeat heartbeat_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// One incarnation of a worker's process: a member, or the two of a pair, which share an event loop and end together.
// Threads: one thread constructs it and calls Run(); the others are its own.
class WorkerSession {
 public:
  // At least one member, at most two. A node is configured after those before it in the list.
  struct Member {
    MembershipClient* client = nullptr;         // outlives the session
    transport::Connector* connector = nullptr;  // outlives the session
    std::unique_ptr<WorkerNode> node;
    std::string name;
  };
  explicit WorkerSession(std::vector<Member> members);

  // Blocks until all memberships have ended. When one ends, the others leave; where it was drained they are drained as
  // well. Returns how the first one ended.
  absl::Status Run();

  bool WasInVain() const;  // after Run()
  bool Served() const;     // after Run()

 private:
  void Attend(size_t index);
  void Configure(size_t index, const Configuration& configuration);
  void Begin();
  int Turn();
  absl::Time NextTurn() const;
  absl::Duration TakeBusiest(size_t index);  // as NodeLoop's, for this member

  std::vector<std::unique_ptr<MemberSession>> members_;
  Mutex mutex_;
  CondVar changed_;
  size_t configured_ ABSL_GUARDED_BY(mutex_) = 0;  // members, in their order
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Duration> busiest_ ABSL_GUARDED_BY(mutex_);  // by member: turns of which it has not told yet
  NodeLoop loop_;                                                // last: its thread uses the rest
};

}  // namespace dovetail::control
