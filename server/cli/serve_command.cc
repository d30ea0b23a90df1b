#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <ctime>
#include <utility>

#include "base/log.h"
#include "server/cli/commands.h"
#include "server/cli/model_text.h"
#include "server/http/http_server.h"

namespace dovetail::cli {
namespace {

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// A core dump would hold prompts and keys.
void ForbidCoreDumps() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
}

absl::Status CheckNames(const ServeFlags& flags) {
  for (const std::string& name : flags.served_model_names)
    if (name.empty() || name.size() > 512)
      return InvalidArgument("--served-model-name: a name has 1 to 512 bytes, not ", name.size());
  return absl::OkStatus();
}

}  // namespace

absl::Status RunServe(const ServeFlags& flags) {
  ForbidCoreDumps();
  DT_RETURN_IF_ERROR(CheckNames(flags));
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread begins: they inherit it
  server::HttpServerOptions options;
  options.host = flags.host;
  options.port = flags.port;
  options.api_keys = flags.api_keys;
  options.metrics_api_keys = flags.metrics_api_keys;
  options.max_queued_requests = flags.engine.max_queued_requests;
  options.overload_status = flags.overload_status;
  options.seed = flags.engine.seed;
  server::HttpServer http(options);
  DT_RETURN_IF_ERROR(http.Start());
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_ASSIGN_OR_RETURN(auto served,
                      MakeServedModel(*engine.model->checkpoint, {.names = flags.served_model_names,
                                                                  .accept_any_name = flags.ignore_model_name,
                                                                  .chat_template = flags.chat_template,
                                                                  .max_model_len = engine.max_model_len,
                                                                  .model_digest = engine.cluster->model_digest()}));
  LogInfo("serving ", served->names.front(), ": ", engine.model->weight_bytes >> 20, " MiB of weights, KV cache of ",
          engine.cluster->kv_tokens(), " tokens (", engine.cluster->kv_bytes() >> 20, " MiB) on ", flags.engine.attention_workers,
          " attention worker(s)");
  http.Serve(std::move(served), engine.cluster.get(), kSegmentTokens,
             static_cast<int64_t>(engine.cluster->kv_tokens() / kSegmentTokens));
  std::printf("listening on http://%s:%d\n", flags.host.c_str(), http.port());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&signals, &signal);
  LogInfo("draining: running requests have ", flags.shutdown_timeout, " s; a second signal ends them at once");
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // from here on the default action: the process ends
  http.Drain(absl::Seconds(flags.shutdown_timeout));
  http.Stop();
  return absl::OkStatus();
}

}  // namespace dovetail::cli
