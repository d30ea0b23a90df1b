#include <filesystem>
#include <fstream>

#include "loadgen/report.h"

namespace dovetail::loadgen {

absl::Status SaveResult(const nlohmann::ordered_json& result, const std::string& path, bool append) {
  namespace fs = std::filesystem;
  const auto failed = [&](const std::string& what) { return absl::UnavailableError(absl::StrCat(path, ": ", what)); };
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  if (error) return failed(absl::StrCat("its folder cannot be made: ", error.message()));
  const bool has_text = append && fs::exists(path, error) && fs::file_size(path, error) > 0;
  std::ofstream file(path, append ? std::ios::app : std::ios::trunc);
  if (has_text) file << "\n";
  file << result.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  file.close();
  if (!file) return failed("cannot be written");
  return absl::OkStatus();
}

}  // namespace dovetail::loadgen
