#include "server/cli/limit_flags.h"

#include "server/cli/command_line.h"
#include "server/cli/engine_flags.h"

namespace dovetail::cli {

void AddLimitFlags(CLI::App& command, LimitFlags& flags) {
  command
      .add_option("--max-connections", flags.max_connections,
                  "HTTP connections at once; fewer where ulimit -n is lower, as a line at start says. Beyond it only "
                  "probes are answered, others get 503")
      ->check(WholeNumber(1, 1 << 20))
      ->type_name("N")
      ->group("API");
  command
      .add_option("--max-body-bytes", flags.max_body,
                  "The largest body of a request, over HTTP and gRPC, at most 64MiB; a larger one gets 413")
      ->type_name("SIZE")
      ->group("API");
  command
      .add_option("--max-unfinished-body-bytes", flags.max_unfinished_bodies,
                  "Memory for the bodies of all requests that are being read or wait to be parsed; one that finds no "
                  "room gets 503")
      ->type_name("SIZE")
      ->group("API");
  command
      .add_option("--max-unread-grpc-bytes", flags.max_unread_grpc,
                  "Memory for what gRPC has received of messages that are not whole, or not read, yet; calls beyond it "
                  "end with RESOURCE_EXHAUSTED")
      ->type_name("SIZE")
      ->group("API");
  command
      .add_option("--max-queued-work", flags.max_queued_work,
                  "Requests of both APIs that wait to be parsed and tokenised; half of them for one tenant of several. "
                  "One more gets 503, or RESOURCE_EXHAUSTED")
      ->check(WholeNumber(1, 1 << 20))
      ->type_name("N")
      ->group("API");
  command
      .add_option("--min-body-rate", flags.min_body_rate,
                  "Bytes a second at which a body must arrive, or it gets 408; it may stall for 10 s")
      ->type_name("SIZE")
      ->group("API");
  command
      .add_option(
          "--stream-keep-alive", flags.stream_keep_alive,
          "Seconds after which a stream that brings nothing brings a comment, so that proxies keep it; a stream "
          "that waits for its first token begins with it. 0: never")
      ->check(WholeNumber(0, 86400, "0 is never"))
      ->type_name("SECONDS")
      ->group("API");
  command
      .add_option(
          "--request-timeout", flags.request_timeout,
          "Seconds from a request's arrival to the end of its answer, over HTTP and gRPC: one that takes longer "
          "ends with 504, an error in its stream, or DEADLINE_EXCEEDED, and its KV is freed. 0: no limit")
      ->check(WholeNumber(0, 7 * 86400, "0 is no limit"))
      ->type_name("SECONDS")
      ->group("API");
}

absl::Status SetLimits(const LimitFlags& flags, server::HttpServerOptions& options) {
  options.max_connections = flags.max_connections;
  options.max_queued_work = flags.max_queued_work;
  options.stream_keep_alive = std::chrono::seconds(flags.stream_keep_alive);
  options.request_timeout = std::chrono::seconds(flags.request_timeout);
  DT_ASSIGN_OR_RETURN(options.max_body_bytes, ParseBytes("--max-body-bytes", flags.max_body));
  DT_ASSIGN_OR_RETURN(options.max_unfinished_body_bytes,
                      ParseBytes("--max-unfinished-body-bytes", flags.max_unfinished_bodies));
  DT_ASSIGN_OR_RETURN(options.min_body_bytes_per_s, ParseBytes("--min-body-rate", flags.min_body_rate));
  return absl::OkStatus();
}

absl::Status SetLimits(const LimitFlags& flags, server::GrpcServerOptions& options) {
  DT_ASSIGN_OR_RETURN(options.max_message_bytes, ParseBytes("--max-body-bytes", flags.max_body));
  options.request_timeout = absl::Seconds(flags.request_timeout);
  DT_ASSIGN_OR_RETURN(options.max_unread_bytes, ParseBytes("--max-unread-grpc-bytes", flags.max_unread_grpc));
  return options.Validate();
}

std::vector<std::string> ArgumentsOf(const LimitFlags& flags) {
  return {"--max-connections",
          std::to_string(flags.max_connections),
          "--max-body-bytes",
          flags.max_body,
          "--max-unfinished-body-bytes",
          flags.max_unfinished_bodies,
          "--max-unread-grpc-bytes",
          flags.max_unread_grpc,
          "--max-queued-work",
          std::to_string(flags.max_queued_work),
          "--min-body-rate",
          flags.min_body_rate,
          "--stream-keep-alive",
          std::to_string(flags.stream_keep_alive),
          "--request-timeout",
          std::to_string(flags.request_timeout)};
}

}  // namespace dovetail::cli
