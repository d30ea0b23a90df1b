#pragma once
#include <memory>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/http/open_files.h"
#include "server/http/options.h"
#include "server/metrics/server_metrics.h"
#include "server/openai/served_model.h"
#include "server/work/intake.h"

namespace dovetail::server {

// The OpenAI-style API of one model over HTTP/1.1. Starts to listen before the model is loaded (/live answers, /ready
// does not), serves once it is told what.
//
//   HttpServer server(options);
//   DT_RETURN_IF_ERROR(server.Start());          // server.port()
//   server.Serve(model, engine);
//   ... SIGTERM: server.Drain(absl::Seconds(30)); server.Stop();
// Threads: thread-safe.
class HttpServer {
 public:
  // `intake`: shared with the server's other APIs; Stop() stops its queue, so they stop before. Null: one of its own,
  // of worker_threads and work_limits().
  explicit HttpServer(HttpServerOptions options, std::shared_ptr<Intake> intake = nullptr);
  ~HttpServer();  // Stop()

  // Checks the options, binds, starts the threads. Once.
  absl::Status Start();
  int port() const;  // the real one, after Start()

  // From now on requests run on `engine`, which outlives the server (Stop() cancels what it still runs).
  // `metrics` is shared with the server's other APIs; null: of this one alone.
  void Serve(std::shared_ptr<const ServedModel> model, engine::Engine* engine,
             std::shared_ptr<ServerMetrics> metrics = nullptr);

  // Readiness fails and new requests get 503 with Retry-After at once; running ones go on. Blocks until all ended, at
  // most `limit`: then the rest gets an error frame (or 503) and is cancelled. Returns whether all ended by themselves.
  bool Drain(absl::Duration limit);

  // Closes all connections, cancels their requests, joins the threads.
  void Stop();

  // How many connections there may be, and why; after Serve() also for what the engine keeps open.
  ConnectionLimit connection_limit() const;
  int connections() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::server
