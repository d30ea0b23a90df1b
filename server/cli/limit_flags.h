#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/grpc/generation_service.h"
#include "server/http/options.h"

namespace dovetail::cli {

// What clients may take of this server's memory and descriptors.
// Threads: thread-compatible.
struct LimitFlags {
  int max_connections = 4096, max_queued_work = 256;
  int stream_keep_alive = 10;  // seconds
  int request_timeout = 0;     // seconds; 0: none
  std::string max_body = "4MiB", max_unfinished_bodies = "256MiB", max_unread_grpc = "256MiB", min_body_rate = "8KiB";
};
void AddLimitFlags(CLI::App& command, LimitFlags& flags);

// kInvalidArgument names the flag whose value is no size. Ranges are HttpServerOptions::Validate's.
absl::Status SetLimits(const LimitFlags& flags, server::HttpServerOptions& options);
absl::Status SetLimits(const LimitFlags& flags, server::GrpcServerOptions& options);  // validated

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const LimitFlags& flags);

}  // namespace dovetail::cli
