#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/api_key.h"
#include "server/http/cors.h"
#include "server/http/request_head.h"
#include "server/http/tls_options.h"
#include "server/metrics/request_trace.h"
#include "server/openai/json.h"
#include "server/version.h"
#include "server/work/fair_queue.h"

namespace dovetail::server {

// What the log says of requests besides the line at the end of each.
// Threads: thread-compatible; a value.
struct RequestLogOptions {
  bool begins = false;  // a line as each begins: its parameters, and its prompt where LogLevel::kDebug is kept
  size_t max_prompt_length = 2048;  // of it: characters, or token ids
  bool stats = true;                // a line of throughput (throughput_log.h)
};

// Threads: thread-compatible; a value.
struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: a free one, see HttpServer::port()
  int io_threads = 1;
  int worker_threads = 1;        // parse, render and tokenise
  int max_queued_work = 256;     // requests waiting for a worker; half of them for one tenant of several
  int overload_status = 503;     // or 429: what a full queue answers
  std::optional<uint64_t> seed;  // of requests that bring none; nullopt: a random one each

  std::vector<ApiKey> api_keys;          // empty: every client may do everything
  std::vector<ApiKey> metrics_api_keys;  // the keys that may read /metrics; empty: the API keys

  CorsOptions cors;
  TlsOptions tls;
  RequestLogOptions log;
  TraceOptions traces;

  int max_connections = 4096;  // fewer where open files are short
  HeadLimits head;
  size_t max_body_bytes = size_t{4} << 20;
  size_t max_unfinished_body_bytes = size_t{256} << 20;  // of all bodies that are not parsed yet
  JsonLimits json;

  std::chrono::milliseconds tls_handshake_timeout{10'000};
  std::chrono::milliseconds header_timeout{10'000};       // from the first byte (or the accept) to the end of the head
  std::chrono::milliseconds body_grace{10'000};           // that a body may bring nothing, or fall behind the rate
  size_t min_body_bytes_per_s = 8 * 1024;                 // without the framing of chunks
  std::chrono::milliseconds idle_timeout{60'000};         // between requests, and
  std::chrono::milliseconds min_idle{1'000};              // where another's request needs its place
  std::chrono::milliseconds write_stall_timeout{30'000};  // the client took no byte for so long: it counts as gone
  std::chrono::milliseconds linger_timeout{2'000};        // after an error, for the client to read it
  std::chrono::milliseconds health_stall_limit{60'000};   // work but no progress: /health fails

  // Of one stream, not yet taken by the client. At half of either the engine pauses the request until the client took
  // all.
  size_t max_stream_backlog_bytes = 64 * 1024;
  int max_stream_backlog_tokens = 256;
  // A stream that has brought nothing for so long, or has not begun, brings a comment; 0: never. Until the first one a
  // request that fails gets its own status.
  std::chrono::milliseconds stream_keep_alive{10'000};
  // From the arrival of a generating request's body to the end of its answer; 0: no limit.
  std::chrono::milliseconds request_timeout{0};
  int socket_send_buffer_bytes = 64 * 1024;  // the kernel's share; 0: its default

  std::string version = kVersion;

  // kInvalidArgument names the flag and what it may be.
  absl::Status Validate() const;

  // Of the requests that wait for a worker. Where keys tell tenants apart, none of them may fill the queue alone.
  WorkLimits work_limits() const;
};

}  // namespace dovetail::server
