#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/options.h"

namespace dovetail::cli {

// What clients may take of this server's memory and descriptors.
struct LimitFlags {
  int max_connections = 4096;
  std::string max_body = "4MiB", max_unfinished_bodies = "256MiB", min_body_rate = "8KiB";
};
void AddLimitFlags(CLI::App& command, LimitFlags& flags);

// kInvalidArgument names the flag whose value is no size. Ranges are HttpServerOptions::Validate's.
absl::Status SetLimits(const LimitFlags& flags, server::HttpServerOptions& options);

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const LimitFlags& flags);

}  // namespace dovetail::cli
