#include "compute_worker/compute_worker_main.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/compute_role.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {

absl::Status RunComputeWorker(const ComputeWorkerFlags& flags) {
  if (flags.check_flags) return CheckComputeWorkerFlags(flags);
  const std::string process = flags.name.empty() ? "compute" : flags.name;
  BeginRole(process);
  const LogWriter log(LogOptionsOf(flags.log, process));
  StopSignal stop;
  DT_ASSIGN_OR_RETURN(const auto role, PrepareComputeRole(flags, "dovetail-compute-worker",
                                                          flags.name.empty() ? DefaultName("compute") : flags.name));
  control::WorkerMain worker(
      role->options, role->connectors, [&](transport::Connector& connector, const control::JoinReply&) {
        role->WarnOfWhatIsShort(flags);
        return compute::MakeComputeWorker(*role->loaded.model, role->options.model->digest, *role->device, connector,
                                          role->tuning, flags.engine.trace_file);
      });
  if (!flags.engine.trace_file.empty()) stop.OwnerEnds();  // the trace is written at the end
  return stop.RunUntil([&] { return worker.Run(); }, [&] { worker.Stop(); });
}

}  // namespace dovetail::cli
