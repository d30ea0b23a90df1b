#include "server/cli/text_file.h"

#include <fstream>
#include <sstream>
#include <utility>

namespace dovetail::cli {

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return NotFound(path, ": cannot be read");
  return std::move(text).str();
}

}  // namespace dovetail::cli
