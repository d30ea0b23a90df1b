#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "control/node_loop.h"
#include "control/security.h"
#include "scheduler/cluster_scheduler.h"

namespace dovetail::scheduler {

// The gRPC face of a ClusterScheduler: Membership, Generation and Admin on one port, with health and reflection. Calls
// are checked on gRPC's threads and carried out on the loop's.
// Threads: one thread, not the loop's, starts, stops and destroys it. Stop() needs the loop to run.
class ControlService {
 public:
  // `scheduler` lives on `loop`; both outlive this. kInvalidArgument: the address; kAlreadyExists: the port is taken.
  static absl::StatusOr<std::unique_ptr<ControlService>> Start(const std::string& listen,
                                                               const control::Security& security,
                                                               control::NodeLoop& loop, ClusterScheduler& scheduler);
  ~ControlService();  // Stop()

  int port() const { return port_; }
  // Ends all calls. The loop must still run.
  void Stop();

 private:
  class Impl;
  ControlService();
  int port_ = 0;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::scheduler
