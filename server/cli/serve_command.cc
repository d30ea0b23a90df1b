#include <utility>

#include "base/log.h"
#include "engine/embedded_cluster.h"
#include "server/cli/cluster_flags.h"
#include "server/cli/commands.h"
#include "server/cli/role.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kBetweenLooks = absl::Milliseconds(200);

// Blocks until a signal comes. Not kOk: the engine cannot go on, and its supervisor starts another.
absl::Status WaitForEnd(const StopSignal& stop, engine::Engine& engine) {
  while (!stop.WaitFor(kBetweenLooks)) {
    const engine::EngineStats stats = engine.stats();
    if (!stats.healthy) return FailedPrecondition(stats.error);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunServe(const ServeFlags& flags) {
  BeginRole("serve");
  const LogWriter log(LogOptionsOf(flags.log, "serve"));
  StopSignal stop;
  DT_ASSIGN_OR_RETURN(const auto spans, MakeExporter(flags.traces, "dovetail", DefaultName("serve")));
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<ApiServer> api, ApiServer::Start(flags.api, flags.engine.seed, spans));
  EngineFlags engine_flags = flags.engine;
  engine_flags.tell_cache = !flags.api.grpc_listen.empty();
  DT_ASSIGN_OR_RETURN(
      const RunningEngine engine,
      StartEngine(engine_flags, LogsAsJson() ? model::LoadProgress() : TerminalProgress("loading"), spans.get()));
  engine::EmbeddedCluster& cluster = *engine.cluster;
  DT_RETURN_IF_ERROR(api->Serve({.grammars = engine.model->grammars,
                                 .checkpoint = engine.model->checkpoint.get(),
                                 .engine = &cluster,
                                 .model_digest = cluster.model_digest(),
                                 .max_model_len = engine.max_model_len,
                                 .max_num_seqs = flags.engine.max_num_seqs,
                                 .kv_dtype = engine.kv_dtype,
                                 .kv_storage = engine.kv_storage,
                                 .kv_blocks = static_cast<int64_t>(cluster.kv_tokens() / kSegmentTokens)}));
  stop.OwnerEnds();
  LogInfo("serving ", api->model_name(), ": ", engine.model->weight_bytes >> 20, " MiB of weights, KV cache of ",
          cluster.kv_tokens(), " tokens (", cluster.kv_bytes() >> 20, " MiB) on ", cluster.attention_workers(),
          " attention worker(s)");
  api->PrintAddresses();
  const absl::Status end = WaitForEnd(stop, cluster);
  stop.EndsAtOnce();
  api->Drain();
  return end;
}

}  // namespace dovetail::cli
