#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "server/http/tls_options.h"

namespace dovetail::cli {

// TLS of the clients' ports, HTTP and gRPC: spelled as in vLLM.
// Threads: thread-compatible.
void AddTlsFlags(CLI::App& command, server::TlsOptions& tls);

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const server::TlsOptions& tls);

}  // namespace dovetail::cli
