#include "server/cli/role_arguments.h"

#include "absl/strings/str_cat.h"

namespace dovetail::cli {
namespace {

constexpr const char* kEndlessly = "86400";  // seconds, the most that a server waits for a model

std::string PortOf(const std::string& address) { return address.substr(address.rfind(':') + 1); }

}  // namespace

Arguments SchedulerArguments(const UpFlags& flags, const std::string& listen, const std::string& prefill_exchange) {
  const EngineFlags& engine = flags.engine;
  Arguments arguments = {"scheduler",
                         "--listen",
                         listen,
                         "--lanes",
                         flags.lanes,
                         "--lease-ms",
                         std::to_string(flags.lease_ms),
                         "--unserved-timeout",
                         std::to_string(flags.unserved_timeout),
                         "--step-timeout",
                         std::to_string(flags.step_timeout),
                         "--max-model-len",
                         std::to_string(engine.max_model_len),
                         "--max-num-seqs",
                         std::to_string(engine.max_num_seqs),
                         "--max-num-batched-tokens",
                         engine.max_num_batched_tokens,
                         "--prefill-itl-budget",
                         engine.prefill_itl_budget,
                         "--max-num-queued-reqs",
                         std::to_string(engine.max_queued_requests),
                         "--replay-one-in",
                         std::to_string(engine.replay_one_in),
                         "--placement",
                         engine.placement,
                         "--micro-batches",
                         std::to_string(engine.micro_batches),
                         "--prefill-ranks",
                         engine.prefill_ranks,
                         "--prefill-exchange",
                         prefill_exchange,
                         "--prefill-rank-tokens",
                         std::to_string(engine.prefill_rank_tokens),
                         engine.enable_prefix_caching ? "--enable-prefix-caching" : "--no-enable-prefix-caching",
                         engine.spill_prefixes ? "--prefix-spill" : "--no-prefix-spill",
                         engine.enable_chunked_prefill ? "--enable-chunked-prefill" : "--no-enable-chunked-prefill"};
  if (engine.seed) arguments.insert(arguments.end(), {"--seed", std::to_string(*engine.seed)});
  if (flags.trust_network) arguments.push_back("--trust-network");
  if (flags.unlike_workers) arguments.push_back("--unlike-workers");
  return arguments;
}

Arguments ServerArguments(const UpFlags& flags, const std::string& scheduler, const std::string& http,
                          const std::string& grpc) {
  const ApiFlags& api = flags.server.api;
  Arguments arguments = {"server",
                         "--scheduler",
                         scheduler,
                         "--connect-timeout",
                         kEndlessly,
                         "--host",
                         api.host,
                         "--port",
                         http.empty() ? std::to_string(api.port) : PortOf(http),
                         "--overload-status",
                         std::to_string(api.overload_status),
                         "--shutdown-timeout",
                         std::to_string(api.shutdown_timeout)};
  const auto add = [&](const std::string& flag, const std::string& value) {
    if (!value.empty()) arguments.insert(arguments.end(), {flag, value});
  };
  for (const KeySources* sources : {&api.api_keys, &api.metrics_api_keys}) {
    for (const std::string& key : sources->keys) add(sources->flag, key);
    for (const std::string& file : sources->files) add(sources->file_flag, file);
  }
  for (const Arguments& more :
       {ArgumentsOf(api.tls), ArgumentsOf(api.cors), ArgumentsOf(api.limits), ArgumentsOf(api.request_log)})
    arguments.insert(arguments.end(), more.begin(), more.end());
  for (const std::string& name : api.served_model_names) add("--served-model-name", name);
  add("--chat-template", api.chat_template);
  add("--tool-call-parser", api.tool_call_parser);
  add("--reasoning-parser", api.reasoning_parser);
  add("--pooling", api.pooling);
  add("--grpc-listen", grpc.empty() ? api.grpc_listen : grpc);
  add("--otlp-traces-sample-rate", absl::StrCat(api.trace_sample_rate));
  if (api.ignore_model_name) arguments.push_back("--ignore-model-name");
  if (flags.engine.seed) add("--seed", std::to_string(*flags.engine.seed));
  return arguments;
}

}  // namespace dovetail::cli
