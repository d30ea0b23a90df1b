#pragma once
#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dovetail::cli {

// A model's readers call a file by its base name, as a server's clients may see. On the command line an error says the
// path that was given, whole: in place of its base name, or in front of what lies in it. OK stays OK.
// Threads: pure.
inline absl::Status OfWholePath(const absl::Status& status, const std::string& path) {
  if (status.ok()) return status;
  const std::filesystem::path given(path);
  const std::string base = (given.has_filename() ? given : given.parent_path()).filename().string();
  const std::string message(status.message());
  const bool named = absl::StartsWith(message, absl::StrCat(base, ":"));
  return absl::Status(status.code(),
                      named ? absl::StrCat(path, message.substr(base.size())) : absl::StrCat(path, ": ", message));
}

}  // namespace dovetail::cli
