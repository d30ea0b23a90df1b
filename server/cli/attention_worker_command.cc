#include <thread>

#include "attention_worker/attention_worker_main.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/device_choice.h"

namespace dovetail::cli {

absl::Status RunAttentionWorker(const AttentionWorkerFlags& flags) {
  StopSignal stop;
  attention::AttentionWorkerMainOptions role;
  DT_ASSIGN_OR_RETURN(role.kv_bytes, ParseBytes("--kv-capacity", flags.kv_capacity));
  if (role.kv_bytes == 0) return InvalidArgument("--kv-capacity: a worker of no bytes holds no token; write 8GiB");
  role.snapshot_percent = flags.state_snapshots;
  role.trace_file = flags.trace_file;
  DT_ASSIGN_OR_RETURN(const auto device, OpenDevice("--device", flags.device, flags.threads));
  DT_ASSIGN_OR_RETURN(auto connectors, ConnectorsOf(flags.data));
  control::WorkerMainOptions options;
  options.scheduler = flags.control.scheduler;
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  options.role = control::Role::kAttentionWorker;
  options.name = flags.name.empty() ? DefaultName("attention") : flags.name;
  options.capabilities = {role.kv_bytes,
                          flags.threads > 0 ? flags.threads : static_cast<int>(std::thread::hardware_concurrency()),
                          control::MeasureMemoryBandwidth(), device->name()};
  options.join_timeout = absl::Seconds(flags.join_timeout);
  control::WorkerMain worker(options, std::move(connectors),
                             [&](transport::Connector& connector, const control::JoinReply& membership) {
                               return attention::MakeAttentionWorker(role, *device, connector, membership);
                             });
  return stop.RunUntil([&] { return worker.Run(); }, [&] { worker.Stop(); });
}

}  // namespace dovetail::cli
