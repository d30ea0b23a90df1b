#include "server/http/options.h"

#include <algorithm>

namespace dovetail::server {
namespace {

absl::Status InRange(const char* flag, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return InvalidArgument(flag, ": ", value, " is outside ", min, " .. ", max);
}

absl::Status CheckKeys(const char* flag, const std::vector<ApiKey>& keys) {
  for (const ApiKey& key : keys) DT_RETURN_IF_ERROR(CheckApiKey(flag, key));
  return CheckTenants(flag, keys);
}

bool SeveralTenants(const std::vector<ApiKey>& keys) {
  return std::any_of(keys.begin(), keys.end(), [&](const ApiKey& key) {
    return &key != &keys.front() && (key.tenant.empty() || key.tenant != keys.front().tenant);
  });
}

}  // namespace

WorkLimits HttpServerOptions::work_limits() const {
  const int part = SeveralTenants(api_keys) ? 2 : 1;
  return {.tasks = max_queued_work,
          .tenant_tasks = std::max(1, max_queued_work / part),
          .bytes = max_unfinished_body_bytes,
          .tenant_bytes = max_unfinished_body_bytes / part};
}

absl::Status HttpServerOptions::Validate() const {
  if (host.empty()) return InvalidArgument("--host: is empty; 127.0.0.1 is this machine only, 0.0.0.0 everybody");
  DT_RETURN_IF_ERROR(InRange("--port", port, 0, 65535));
  DT_RETURN_IF_ERROR(InRange("io_threads", io_threads, 1, 16));
  DT_RETURN_IF_ERROR(InRange("worker_threads", worker_threads, 1, 64));
  DT_RETURN_IF_ERROR(InRange("--max-queued-work", max_queued_work, 1, 1 << 20));
  if (overload_status != 503 && overload_status != 429)
    return InvalidArgument("--overload-status: ", overload_status, " is neither 503 nor 429");
  DT_RETURN_IF_ERROR(CheckKeys("--api-key", api_keys));
  DT_RETURN_IF_ERROR(CheckKeys("--metrics-api-key", metrics_api_keys));
  DT_RETURN_IF_ERROR(cors.Validate());
  DT_RETURN_IF_ERROR(InRange("--max-connections", max_connections, 1, 1 << 20));
  DT_RETURN_IF_ERROR(InRange("--max-body-bytes", static_cast<int64_t>(max_body_bytes), 1024, int64_t{64} << 20));
  DT_RETURN_IF_ERROR(
      InRange("--max-unfinished-body-bytes", static_cast<int64_t>(max_unfinished_body_bytes), 1024, int64_t{1} << 40));
  if (max_unfinished_body_bytes < max_body_bytes)
    return InvalidArgument("--max-unfinished-body-bytes: ", max_unfinished_body_bytes, " is less than the ",
                           max_body_bytes, " of --max-body-bytes: the largest body could never be read");
  DT_RETURN_IF_ERROR(InRange("--min-body-rate", static_cast<int64_t>(min_body_bytes_per_s), 1, 1 << 30));
  DT_RETURN_IF_ERROR(
      InRange("max_stream_backlog_bytes", static_cast<int64_t>(max_stream_backlog_bytes), 1024, 64 << 20));
  DT_RETURN_IF_ERROR(InRange("max_stream_backlog_tokens", max_stream_backlog_tokens, 2, 1 << 20));
  DT_RETURN_IF_ERROR(InRange("--stream-keep-alive in milliseconds", stream_keep_alive.count(), 0, 86'400'000));
  for (const auto timeout : {tls_handshake_timeout, header_timeout, body_grace, idle_timeout, min_idle,
                             write_stall_timeout, linger_timeout, health_stall_limit})
    DT_RETURN_IF_ERROR(InRange("a timeout in milliseconds", timeout.count(), 1, 86'400'000));
  return absl::OkStatus();
}

}  // namespace dovetail::server
