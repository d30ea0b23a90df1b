#pragma once
#include <string>
#include <vector>

#include "server/cli/cluster_commands.h"

// What `up` starts its scheduler and its server with: words of the command line, without the binary's name and without
// the flags of logs and traces.
// Threads: pure.

namespace dovetail::cli {

using Arguments = std::vector<std::string>;

// `prefill_exchange`: in place of what the flags say.
Arguments SchedulerArguments(const UpFlags& flags, const std::string& listen, const std::string& prefill_exchange);

// `http` and `grpc` are addresses where a former server listened; empty: there was none.
Arguments ServerArguments(const UpFlags& flags, const std::string& scheduler, const std::string& http,
                          const std::string& grpc);

}  // namespace dovetail::cli
