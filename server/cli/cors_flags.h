#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/cors.h"

namespace dovetail::cli {

// Which web pages may use the API: spelled as in vLLM, lists as JSON. Unlike there, none may unless flags say so.
// Threads: thread-compatible.
struct CorsFlags {
  std::string origins, methods = R"(["*"])", headers = R"(["*"])";
  bool credentials = false;
};
void AddCorsFlags(CLI::App& command, CorsFlags& flags);

// kInvalidArgument names the flag that is no JSON list of strings. What is in the lists is not checked here.
absl::StatusOr<server::CorsOptions> CorsOptionsOf(const CorsFlags& flags);

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const CorsFlags& flags);

}  // namespace dovetail::cli
