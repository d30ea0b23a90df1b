#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "control/node_loop.h"
#include "control/security.h"
#include "scheduler/cluster_scheduler.h"
#include "scheduler/control_service.h"
#include "transport/connector.h"

namespace dovetail::scheduler {

struct SchedulerMainOptions {
  std::string listen = "127.0.0.1:7100";
  control::Security security;
  SchedulerOptions scheduler;  // max_model_len 0: what the model allows; attention and digest come with the model
  absl::Duration lease = absl::Milliseconds(400);
  int max_workers = 128;
  bool unlike_workers = false;  // MembershipOptions
  uint64_t seed = 0;
  absl::Duration unserved_timeout = kUnservedTimeout;
  SpanSink* spans = nullptr;  // of traces; outlives it
};

// A scheduler process: connector, loop, ClusterScheduler and its gRPC service. Runs until destroyed.
// Threads: one thread starts and destroys it; the rest runs on threads of its own.
class SchedulerMain {
 public:
  // `connector` is node 0's, of incarnation `epoch`. Errors as ControlService::Start.
  static absl::StatusOr<std::unique_ptr<SchedulerMain>> Start(const SchedulerMainOptions& options, Epoch epoch,
                                                              std::unique_ptr<transport::Connector> connector);
  ~SchedulerMain();

  int port() const { return service_->port(); }

 private:
  SchedulerMain() = default;
  std::unique_ptr<transport::Connector> connector_;
  std::unique_ptr<control::NodeLoop> loop_;
  std::unique_ptr<ClusterScheduler> scheduler_;
  std::unique_ptr<ControlService> service_;
};

}  // namespace dovetail::scheduler
