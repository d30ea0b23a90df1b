#include "server/cli/api_server.h"

#include <utility>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "base/log.h"
#include "control/security.h"
#include "server/cli/command_line.h"
#include "server/cli/model_text.h"
#include "server/cli/tokenizer_files.h"

namespace dovetail::cli {
namespace {

absl::StatusOr<server::HttpServerOptions> HttpOptionsOf(const ApiFlags& flags, std::optional<uint64_t> seed) {
  server::HttpServerOptions options;
  options.host = flags.host;
  options.port = flags.port;
  DT_ASSIGN_OR_RETURN(options.api_keys, ReadKeys(flags.api_keys));
  DT_ASSIGN_OR_RETURN(options.metrics_api_keys, ReadKeys(flags.metrics_api_keys));
  options.tls = flags.tls;
  DT_ASSIGN_OR_RETURN(options.cors, CorsOptionsOf(flags.cors));
  DT_RETURN_IF_ERROR(SetLimits(flags.limits, options));
  options.overload_status = flags.overload_status;
  options.log = RequestLogOptionsOf(flags.request_log);
  options.seed = seed;
  return options;
}

bool IsLoopback(const std::string& host) {
  return host.rfind("127.", 0) == 0 || host == "::1" || host == "[::1]" || host == "localhost";
}

// Once, and first: a port that anyone may use is a mistake more often than not.
void WarnOfOpenPorts(const ApiFlags& flags, const std::vector<server::ApiKey>& keys) {
  if (!keys.empty()) return;
  std::vector<std::string> open;
  const char* scheme = flags.tls.enabled() ? "https://" : "http://";
  if (!IsLoopback(flags.host)) open.push_back(absl::StrCat(scheme, flags.host, ":", flags.port));
  if (!flags.grpc_listen.empty() && !IsLoopback(flags.grpc_listen.substr(0, flags.grpc_listen.rfind(':'))))
    open.push_back(absl::StrCat("grpc://", flags.grpc_listen));
  if (open.empty()) return;
  LogWarning("OPEN TO THE NETWORK: ", absl::StrJoin(open, " and "),
             " can be used by everyone who reaches it, as no API key is asked for; give --api-key-file, or listen on "
             "127.0.0.1");
}

absl::Status CheckNames(const ApiFlags& flags) {
  for (const std::string& name : flags.served_model_names)
    if (name.empty() || name.size() > 512)
      return InvalidArgument("--served-model-name: a name has 1 to 512 bytes, not ", name.size());
  return absl::OkStatus();
}

void AddAddressFlags(CLI::App& command, ApiFlags& flags) {
  command
      .add_option("--host", flags.host,
                  "Address or name to listen on; 127.0.0.1 is this machine only, 0.0.0.0 everybody")
      ->type_name("HOST")
      ->group("API");
  command.add_option("--port", flags.port, "Port to listen on; 0 takes a free one and prints it")
      ->check(WholeNumber(0, 65535, "0 takes a free one"))
      ->type_name("PORT")
      ->group("API");
  command
      .add_option("--grpc-listen", flags.grpc_listen,
                  "Also serve the gRPC generation API there, as 127.0.0.1:50051; else not at all")
      ->type_name("HOST:PORT")
      ->group("API");
}

void AddModelFlags(CLI::App& command, ApiFlags& flags) {
  command
      .add_option("--served-model-name", flags.served_model_names,
                  "What the API calls the model; may be repeated, the first is shown. Else the file's name")
      ->allow_extra_args(false)
      ->type_name("NAME")
      ->group("API");
  command
      .add_flag("--any-model-name,--ignore-model-name", flags.ignore_model_name,
                "Serve requests for other models too, in place of answering 404 [off]")
      ->group("API");
  command
      .add_option(
          "--chat-template", flags.chat_template,
          "Chat template: a Jinja file, a built-in one (chatml, llama3, gemma, mistral, phi3, zephyr, llama2), or "
          "none, in place of the model's own")
      ->type_name("FILE|NAME")
      ->group("API");
  command
      .add_option("--tool-call-parser", flags.tool_call_parser,
                  "How answers spell calls of tools: hermes, llama3_json, pythonic, mistral, mistral_array, "
                  "qwen3_coder, granite, minimax_m2, kimi_k2, openai, deepseek_v3, deepseek_v31, or none; else as the "
                  "chat template does")
      ->type_name("NAME")
      ->group("API");
  command
      .add_option("--reasoning-parser", flags.reasoning_parser,
                  "How answers mark thoughts: think, mistral, seed_oss, openai, or none; else as the chat template "
                  "does")
      ->type_name("NAME")
      ->group("API");
  command
      .add_option(
          "--pooling", flags.pooling,
          "Of which tokens' hidden states /v1/embeddings makes a vector: mean (of all), last or cls (the first); "
          "else as the model's files say, and last where they say nothing")
      ->check(OneOf({"mean", "last", "cls"}))
      ->type_name("KIND")
      ->group("API");
}

void AddLoadFlags(CLI::App& command, ApiFlags& flags) {
  command
      .add_option("--overload-status", flags.overload_status,
                  "What a full queue answers: 503 (ask another replica) or 429 (ask again later)")
      ->check(OneOf({"503", "429"}))
      ->type_name("CODE")
      ->group("API");
  command
      .add_option("--shutdown-timeout", flags.shutdown_timeout,
                  "Seconds that running requests have to end after SIGTERM; a second signal ends them at once")
      ->check(WholeNumber(0, 86400))
      ->type_name("SECONDS")
      ->group("API");
}

}  // namespace

void AddApiFlags(CLI::App& command, ApiFlags& flags) {
  AddAddressFlags(command, flags);
  AddKeyFlags(command, flags.api_keys,
              "A key that clients must send as Authorization: Bearer KEY; each is a tenant of its own. Without one "
              "everybody may ask");
  AddKeyFlags(command, flags.metrics_api_keys, "A key for /metrics alone; without one API keys do");
  AddTlsFlags(command, flags.tls);
  AddCorsFlags(command, flags.cors);
  AddModelFlags(command, flags);
  AddLoadFlags(command, flags);
  AddLimitFlags(command, flags.limits);
  AddRequestLogFlags(command, flags.request_log);
  AddSampleRateFlag(command, flags.trace_sample_rate);
}

absl::Status CheckApiFlags(const ApiFlags& flags) {
  DT_RETURN_IF_ERROR(CheckNames(flags));
  DT_RETURN_IF_ERROR(CorsOptionsOf(flags.cors).status());
  if (!flags.grpc_listen.empty())
    DT_RETURN_IF_ERROR(control::CheckAddress("--grpc-listen", flags.grpc_listen, /*may_be_free=*/true));
  server::HttpServerOptions http;
  DT_RETURN_IF_ERROR(SetLimits(flags.limits, http));
  server::GrpcServerOptions grpc;
  return SetLimits(flags.limits, grpc);
}

ApiServer::ApiServer(const ApiFlags& flags, server::HttpServerOptions options)
    : flags_(flags),
      keys_(options.api_keys),
      traces_(options.traces),
      intake_(std::make_shared<server::Intake>(options.worker_threads, options.work_limits())),
      http_(std::move(options), intake_) {}

absl::StatusOr<std::unique_ptr<ApiServer>> ApiServer::Start(const ApiFlags& flags, std::optional<uint64_t> seed,
                                                            std::shared_ptr<SpanSink> spans) {
  DT_RETURN_IF_ERROR(CheckNames(flags));
  DT_ASSIGN_OR_RETURN(server::HttpServerOptions options, HttpOptionsOf(flags, seed));
  options.traces = {std::move(spans), flags.trace_sample_rate};
  server::GrpcServerOptions grpc_limits;
  DT_RETURN_IF_ERROR(SetLimits(flags.limits, grpc_limits));  // now, and not once the model has loaded
  std::unique_ptr<ApiServer> api(new ApiServer(flags, std::move(options)));
  DT_RETURN_IF_ERROR(api->http_.Start());
  WarnOfOpenPorts(flags, api->keys_);
  WarnOfReadableKeys(flags.api_keys);
  WarnOfReadableKeys(flags.metrics_api_keys);
  return api;
}

absl::Status ApiServer::Serve(const ServedEngine& served) {
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<const server::ServedModel> model,
                      MakeServedModel(*served.checkpoint, {.names = flags_.served_model_names,
                                                           .accept_any_name = flags_.ignore_model_name,
                                                           .chat_template = flags_.chat_template,
                                                           .chatml_at_last = true,
                                                           .tool_call_parser = flags_.tool_call_parser,
                                                           .reasoning_parser = flags_.reasoning_parser,
                                                           .pooling = flags_.pooling,
                                                           .max_model_len = served.max_model_len,
                                                           .max_num_seqs = served.max_num_seqs,
                                                           .grammars = served.grammars,
                                                           .model_digest = served.model_digest}));
  name_ = model->names.front();
  LogInfo("answers: --tool-call-parser ", model->calls == nullptr ? "none" : std::string(model->calls->name),
          ", --reasoning-parser ", model->thoughts == nullptr ? "none" : std::string(model->thoughts->name));
  const auto metrics = std::make_shared<server::ServerMetrics>(
      server::ServerMetrics::Info{name_, model->max_model_len, kSegmentTokens, served.kv_blocks, kVersion});
  if (!flags_.grpc_listen.empty()) {
    server::GrpcServerOptions options;
    options.listen = flags_.grpc_listen;
    options.api_keys = keys_;
    options.tls = flags_.tls;
    DT_RETURN_IF_ERROR(SetLimits(flags_.limits, options));
    options.max_num_seqs = served.max_num_seqs;
    options.kv_cache_dtype =
        std::string(served.kv_storage != KvStorage::kAsSent ? Name(served.kv_storage) : Name(served.kv_dtype));
    auto tokenizer = TokenizerFilesOf(*served.checkpoint);
    const absl::Status read = tokenizer.status();
    if (read.ok()) options.tokenizer = *std::move(tokenizer);
    const bool absent = absl::IsFailedPrecondition(read);
    if (!read.ok() && !absent) LogWarning("gRPC: GetTokenizer will not be answered: ", read.message());
    options.why_no_tokenizer = absent ? std::string(read.message()) : "its files could not be read";
    options.log = RequestLogOptionsOf(flags_.request_log);
    options.traces = traces_;
    DT_ASSIGN_OR_RETURN(grpc_, server::GrpcServer::Start(options, model, served.engine, intake_, metrics));
  }
  http_.Serve(model, served.engine, metrics);
  // Now, and not when the template was chosen: a server that cannot listen says only why.
  if (!model->chat_template_warning.empty()) LogWarning(model->chat_template_warning);
  const server::ConnectionLimit limit = http_.connection_limit();
  if (limit.connections < flags_.limits.max_connections)
    LogWarning("HTTP: ", limit.why);
  else
    LogInfo("HTTP: ", limit.why);
  return absl::OkStatus();
}

void ApiServer::PrintAddresses() const {
  if (grpc_ != nullptr) {
    const std::string host = flags_.grpc_listen.substr(0, flags_.grpc_listen.rfind(':'));
    Announce(absl::StrCat("listening on grpc", flags_.tls.enabled() ? "s" : "", "://", host, ":", grpc_->port()));
  }
  Announce(absl::StrCat("listening on ", scheme(), "://", flags_.host, ":", http_.port()));
}

void ApiServer::Drain() {
  LogInfo("draining: running requests have ", flags_.shutdown_timeout, " s; a second signal ends them at once");
  if (grpc_ != nullptr) grpc_->Stop(absl::Seconds(flags_.shutdown_timeout));
  http_.Drain(absl::Seconds(flags_.shutdown_timeout));
  http_.Stop();
}

}  // namespace dovetail::cli
