#pragma once
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/kv_storage.h"
#include "base/status.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "server/cli/api_keys.h"
#include "server/cli/cors_flags.h"
#include "server/cli/limit_flags.h"
#include "server/cli/log_flags.h"
#include "server/cli/tls_flags.h"
#include "server/cli/trace_flags.h"
#include "server/grpc/generation_service.h"
#include "server/http/http_server.h"

namespace dovetail::cli {

// How clients reach a model: the same for an engine in this process (serve) and for that of a cluster (server, up).
struct ApiFlags {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string grpc_listen;  // empty: no gRPC
  KeySources api_keys = ApiKeySources(), metrics_api_keys = MetricsKeySources();
  server::TlsOptions tls;
  CorsFlags cors;
  LimitFlags limits;
  RequestLogFlags request_log;
  double trace_sample_rate = 1;
  std::vector<std::string> served_model_names;
  bool ignore_model_name = false;
  std::string chat_template, tool_call_parser, reasoning_parser;
  std::string pooling;  // empty: as the model's files say, else last
  int overload_status = 503;
  int shutdown_timeout = 30;  // seconds
};
void AddApiFlags(CLI::App& command, ApiFlags& flags);
// What they say by themselves. kInvalidArgument names the flag. Reads no file.
absl::Status CheckApiFlags(const ApiFlags& flags);

struct ServedEngine {
  std::shared_ptr<grammar::GrammarEngine> grammars;  // the workers' of this process, if it has some
  const model::Checkpoint* checkpoint = nullptr;     // its text side
  engine::Engine* engine = nullptr;
  uint64_t model_digest = 0;
  int64_t max_model_len = 0;
  int max_num_seqs = 0;
  DType kv_dtype = DType::kBF16;
  KvStorage kv_storage = KvStorage::kAsSent;
  int64_t kv_blocks = 0;  // shown in the metrics; 0: they change
};

// The HTTP API, and the gRPC one where asked for.
// Threads: thread-compatible.
class ApiServer {
 public:
  // Listens; says that it is loading until Serve(). `seed`: of requests that bring none. `spans`: where those of
  // sampled requests go; null: nowhere. kInvalidArgument names the flag.
  static absl::StatusOr<std::unique_ptr<ApiServer>> Start(const ApiFlags& flags, std::optional<uint64_t> seed,
                                                          std::shared_ptr<SpanSink> spans);

  // Answers requests from now on. The engine outlives this object; the checkpoint need not.
  absl::Status Serve(const ServedEngine& served);

  // "https" or "http".
  const char* scheme() const { return flags_.tls.enabled() ? "https" : "http"; }
  // "smollm2-135m-instruct"; once served.
  const std::string& model_name() const { return name_; }
  // Prints the lines that say where it listens: the process that started this one waits for them.
  void PrintAddresses() const;

  // New requests are refused at once; running ones have the time that the flags give them.
  void Drain();

 private:
  ApiServer(const ApiFlags& flags, server::HttpServerOptions options);

  const ApiFlags flags_;
  const std::vector<server::ApiKey> keys_;
  const server::TraceOptions traces_;
  const std::shared_ptr<server::Intake> intake_;  // both APIs'
  server::HttpServer http_;
  std::unique_ptr<server::GrpcServer> grpc_;
  std::string name_;
};

}  // namespace dovetail::cli
