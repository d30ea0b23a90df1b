#pragma once
#include <string>

#include "base/status.h"

namespace dovetail::cli {

// All of a file. kNotFound names it.
// Threads: thread-safe; blocks on the file.
absl::StatusOr<std::string> ReadText(const std::string& path);

}  // namespace dovetail::cli
