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

}  // namespace

absl::Status RunServe(const ServeFlags& flags) {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread begins: they inherit it
  server::HttpServerOptions options;
  options.host = flags.host;
  options.port = flags.port;
  options.api_keys = flags.api_keys;
  options.metrics_api_keys = flags.metrics_api_keys;
  options.max_queued_requests = flags.engine.max_queued_requests;
  server::HttpServer http(options);
  DT_RETURN_IF_ERROR(http.Start());
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_ASSIGN_OR_RETURN(auto served, MakeServedModel(*engine.model->checkpoint, flags.served_model_name, flags.chat_template,
                                                   engine.max_model_len));
  LogInfo("serving ", served->names.front(), ": ", engine.model->weight_bytes >> 20, " MiB of weights, KV cache of ",
          engine.cluster->kv_tokens(), " tokens (", engine.cluster->kv_bytes() >> 20, " MiB) on ", flags.engine.attention_workers,
          " attention worker(s)");
  http.Serve(std::move(served), engine.cluster.get(), kSegmentTokens);
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
