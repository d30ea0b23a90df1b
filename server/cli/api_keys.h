#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/api_key.h"

namespace dovetail::cli {

// Where the keys of one scope come from. All places count together.
// Threads: thread-compatible; a value.
struct KeySources {
  std::string flag, file_flag;         // "--api-key", "--api-key-file"
  std::vector<std::string> variables;  // of the environment: keys with white space between them
  std::vector<std::string> keys;       // given as flags
  std::vector<std::string> files;      // a key a line, with its tenant's name after white space where it has one
};
KeySources ApiKeySources();
KeySources MetricsKeySources();

void AddKeyFlags(CLI::App& command, KeySources& sources, const std::string& what_for);

// Reads files and environment. Errors name the flag, the file and its line, or the variable, never a key.
// kFailedPrecondition: every user may write the file; kInvalidArgument: a place that is named holds no key, so that a
// mistake does not open the server.
// Threads: thread-safe; blocks on files.
absl::StatusOr<std::vector<server::ApiKey>> ReadKeys(const KeySources& sources);

// Logs what lets other users of this host read a key: a flag, a file's permissions.
// Threads: thread-safe; blocks on files.
void WarnOfReadableKeys(const KeySources& sources);

}  // namespace dovetail::cli
