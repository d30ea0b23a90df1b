#include <cstdio>
#include <random>
#include <utility>

#include "base/log.h"
#include "scheduler/scheduler_main.h"
#include "server/cli/cluster_commands.h"

namespace dovetail::cli {

absl::Status RunScheduler(const SchedulerFlags& flags) {
  StopSignal stop;
  scheduler::SchedulerMainOptions options;
  options.listen = flags.listen;
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  options.scheduler = SchedulerOptionsOf(flags.engine);
  options.lease = absl::Milliseconds(flags.lease_ms);
  options.max_workers = flags.max_workers;
  options.seed = flags.engine.seed.value_or(0);
  const Epoch epoch(std::random_device{}() | 1u);
  DT_ASSIGN_OR_RETURN(const auto connectors, ConnectorsOf(flags.data));
  DT_ASSIGN_OR_RETURN(auto connector, connectors(NodeId(0), epoch));
  LogInfo("data plane: ", connector->version(), ", lanes ", flags.data.lanes);
  DT_ASSIGN_OR_RETURN(const auto main, scheduler::SchedulerMain::Start(options, epoch, std::move(connector)));
  const std::string host = flags.listen.substr(0, flags.listen.rfind(':'));
  std::printf("listening on %s:%d\n", host.c_str(), main->port());
  std::fflush(stdout);
  stop.Wait();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
