#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/certificate_watch.h"
#include "base/clock.h"
#include "control/messages.h"
#include "proto/control/dovetail_admin.pb.h"
#include "proto/control/dovetail_control.pb.h"
#include "scheduler/control_generation.h"
#include "scheduler/control_members.h"
#include "scheduler/scheduler_node.h"
#include "transport/connector.h"

namespace dovetail::scheduler {

inline constexpr absl::Duration kUnservedTimeout = absl::Seconds(10);

struct ClusterSchedulerOptions {
  // attention and model_digest come with the model; max_model_len 0: what the model allows.
  SchedulerOptions scheduler;
  MembershipOptions membership;
  uint64_t seed = 0;
  absl::Duration unserved_timeout = kUnservedTimeout;  // requests wait so long while nothing can run them
  SpanSink* spans = nullptr;                           // of sampled traces; outlives the scheduler
  std::string certificate_file;                        // of the control plane; empty: none
};

// A worker's stream, as the loop uses it.
// Threads: the functions are thread-safe.
struct WorkerStream {
  std::function<void(control::v1::SchedulerOrder)> send;
  std::function<void(const absl::Status&)> close;
};

// The scheduler of a cluster: members, servers, and, once there is a model, the scheduler's node.
// Threads: reactor-owned.
class ClusterScheduler {
 public:
  // `connector` and `clock` outlive it.
  ClusterScheduler(ClusterSchedulerOptions options, transport::Connector& connector, Clock& clock);

  // Membership.
  absl::StatusOr<control::JoinReply> Join(const control::JoinRequest& request);
  // Of all files that the member announced. kNotFound: no compute worker of this cluster.
  absl::StatusOr<uint64_t> AnnouncedFileBytes(WorkerId worker, Epoch epoch) const;
  absl::Status PutModelFiles(WorkerId worker, Epoch epoch, std::vector<std::string> contents);
  absl::Status Attend(WorkerId worker, Epoch epoch, WorkerStream stream);
  void OnHeartbeat(WorkerId worker, control::Heartbeat heartbeat);
  void OnReady(WorkerId worker, const control::Ready& ready);
  void OnApplied(WorkerId worker, const control::Applied& applied);
  void OnLinkFailed(WorkerId worker, const control::LinkFailed& failed);
  void OnStreamEnded(WorkerId worker, Epoch epoch);
  void Leave(WorkerId worker, Epoch epoch);
  std::optional<control::Role> RoleOf(WorkerId worker) const;  // nullopt: no such member

  // Servers. kUnavailable until a compute worker has brought the model.
  absl::Status GetModel(control::v1::GetModelReply& reply) const;
  absl::StatusOr<std::shared_ptr<const std::vector<control::TextFile>>> ModelFiles(uint64_t digest) const;
  absl::StatusOr<uint64_t> AddServer(ControlGeneration::SendFn send);
  void RemoveServer(uint64_t server) { generation_.RemoveServer(server); }
  void OnCommands(uint64_t server, const control::v1::GenerationCommands& commands) {
    generation_.OnCommands(server, commands);
  }

  // Operators.
  void Describe(admin::v1::ClusterStatus& status) const;
  // `alone`: kAborted while another worker of its role drains.
  absl::Status Drain(WorkerId worker, bool alone = false);
  absl::Status Drain(const std::string& name, bool alone = false);

  // One turn of the loop; returns how many frames were handled.
  int Turn();
  absl::Time NextDeadline() const;

 private:
  void Perform(std::vector<MemberAction> actions);
  void On(const SendConfiguration& action);
  void On(const SendPeers& action);
  void On(const ConnectNode& action);
  void On(const DisconnectNode& action);
  void On(const BeginServing& action);
  void On(const DrainMember& action);
  void On(const EndServing& action);
  void On(const LinkComputeWorkers& action);
  void On(const EndSession& action);
  void CloseIfRefused(WorkerId worker, const absl::Status& status);
  absl::Status BuildNode();
  absl::Status CheckLength(const control::ModelSummary& model) const;
  void WatchLoopGap(absl::Time now);
  void ExcuseWhoRunsHere(absl::Time now);
  void WatchDataPlane(absl::Time now, std::vector<MemberAction>& actions);
  void WatchServing(absl::Time now);
  void FinishDrains();
  void PublishStats(bool something_happened);
  std::string WhyNotServing() const;  // empty: requests can run
  control::v1::Stats Stats() const;
  std::string NameOfNode(NodeId node) const;

  ClusterSchedulerOptions options_;
  const CertificateWatch certificate_{options_.certificate_file};
  transport::Connector& connector_;
  Clock& clock_;
  const absl::Time started_;
  ControlMembers members_;
  std::map<WorkerId, WorkerStream> streams_;
  std::shared_ptr<const std::vector<control::TextFile>> files_;
  std::unique_ptr<SchedulerNode> node_;
  ControlGeneration generation_;
  std::vector<MemberAction> pending_;  // actions of actions
  bool performing_ = false;
  absl::Time last_turn_, last_progress_;
  absl::Time next_stats_, next_look_;
  absl::Time unserved_since_ = absl::InfiniteFuture();  // nothing can run
  absl::Time next_look_at_serving_ = absl::InfinitePast();
  bool outage_ = false;         // for longer than requests wait
  bool warned_unlike_ = false;  // of compute workers that may give other tokens
};

}  // namespace dovetail::scheduler
