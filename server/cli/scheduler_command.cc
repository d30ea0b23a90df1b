#include <random>
#include <utility>

#include "base/log.h"
#include "scheduler/scheduler_main.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/prefill_flags.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

// Checks flags against each other before any worker joins. What depends on the model is checked when the model is
// known.
absl::Status CheckFlags(scheduler::SchedulerOptions options) {
  if (options.max_model_len == 0) options.max_model_len = 1;
  options.ChooseStepTokens(/*on_gpu=*/false);
  proto::SoftmaxSpec any;
  any.query_heads = any.kv_heads = 1;
  any.key_dim = any.value_dim = 64;
  any.scale = 1;
  DT_ASSIGN_OR_RETURN(options.attention, proto::AttentionTable::Build({any}));
  return options.Validate();
}

}  // namespace

absl::Status RunScheduler(const SchedulerFlags& flags) {
  BeginRole("scheduler");
  const LogWriter log(LogOptionsOf(flags.log, "scheduler"));
  StopSignal stop;
  scheduler::SchedulerMainOptions options;
  options.listen = flags.listen;
  DT_RETURN_IF_ERROR(control::CheckAddress("--listen", options.listen, /*may_be_free=*/true));
  options.scheduler = SchedulerOptionsOf(flags.engine);
  options.scheduler.step_timeout = absl::Seconds(flags.step_timeout);
  DT_RETURN_IF_ERROR(CheckPrefillRanks(flags.engine, /*compute_workers=*/std::nullopt));
  DT_RETURN_IF_ERROR(CheckFlags(options.scheduler));
  DT_RETURN_IF_ERROR(CheckTraceFlags(flags.traces));
  if (flags.check_flags) return CheckPlanes(flags.control, flags.data);
  DT_ASSIGN_OR_RETURN(options.security, SecurityOf(flags.control));
  options.lease = absl::Milliseconds(flags.lease_ms);
  options.max_workers = flags.max_workers;
  options.unlike_workers = flags.unlike_workers;
  options.unserved_timeout = absl::Seconds(flags.unserved_timeout);
  options.seed = flags.engine.seed.value_or(0);
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail-scheduler", DefaultName("scheduler")));
  options.spans = spans.get();
  const Epoch epoch(std::random_device{}() | 1u);
  DT_ASSIGN_OR_RETURN(const auto connectors,
                      control::ConnectorsOf(flags.data, options.security, {.address = flags.listen, .listens = true}));
  DT_ASSIGN_OR_RETURN(auto connector, connectors(NodeId(0), epoch));
  LogInfo("data plane: ", connector->version(), ", ", connector->listening());
  DT_ASSIGN_OR_RETURN(const auto main, scheduler::SchedulerMain::Start(options, epoch, std::move(connector)));
  const std::string host = flags.listen.substr(0, flags.listen.rfind(':'));
  Announce(absl::StrCat("listening on ", host, ":", main->port()));
  stop.Wait();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
