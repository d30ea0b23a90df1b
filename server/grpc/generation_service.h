#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/grpc/tokenizer_call.h"
#include "server/http/api_key.h"
#include "server/http/options.h"
#include "server/http/tls_options.h"
#include "server/metrics/server_metrics.h"
#include "server/openai/served_model.h"
#include "server/work/intake.h"

namespace dovetail::server {

struct GrpcServerOptions {
  std::string listen = "127.0.0.1:50051";  // port 0: a free one
  std::vector<ApiKey> api_keys;            // empty: every client may; else metadata `authorization: Bearer KEY`
  TlsOptions tls;                          // as HttpServerOptions::tls
  size_t max_message_bytes = size_t{4} << 20;
  // What gRPC may hold of messages that come, on all connections: while it is used up calls end with
  // RESOURCE_EXHAUSTED.
  size_t max_unread_bytes = size_t{256} << 20;
  int max_num_seqs = 0;                                   // shown to routers
  absl::Duration request_timeout = absl::ZeroDuration();  // of a call, from its arrival to its end; 0: no limit
  std::string kv_cache_dtype;
  std::shared_ptr<const TokenizerArchive> tokenizer;  // null: `why_no_tokenizer` says why
  std::string why_no_tokenizer;
  RequestLogOptions log;
  TraceOptions traces;

  absl::Status Validate() const;  // kInvalidArgument names the flag and what it may be
};

// The generation API for routers: vllm.grpc.engine.VllmEngine, with grpc.health.v1 and reflection. Requests are checked
// by the rules of the HTTP API (server/openai); stop strings end a choice here. A reader that is slow pauses its
// request. Requests wait to be read in the intake's queue, at the cost of their memory, and its admission holds for
// them: one too many is RESOURCE_EXHAUSTED. One that is cancelled, or whose deadline passes, leaves the queue.
// Threads: thread-safe.
class GrpcServer {
 public:
  // `engine` outlives it; `intake` and `metrics` are shared with the server's other APIs. kAlreadyExists: the port is
  // taken; kInvalidArgument: the address.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                           std::shared_ptr<const ServedModel> model,
                                                           engine::Engine* engine, std::shared_ptr<Intake> intake,
                                                           std::shared_ptr<ServerMetrics> metrics);
  ~GrpcServer();  // Stop(0)

  int port() const;

  // Health says NOT_SERVING and new requests are refused at once; running ones have `limit`, then they are cancelled.
  void Stop(absl::Duration limit);

 private:
  class Impl;
  GrpcServer();
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::server
