#include "model/formats/file_errors.h"

#include "absl/strings/escaping.h"

namespace dovetail::model {

std::string BaseName(const std::filesystem::path& path) {
  std::filesystem::path clean = path.lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  return clean.has_filename() ? clean.filename().string() : std::string(".");
}

std::string Printable(std::string_view bytes) {
  constexpr size_t kMaxShown = 80;
  const bool cut = bytes.size() > kMaxShown;
  const std::string_view shown = bytes.substr(0, kMaxShown);
  return absl::CHexEscape(absl::string_view(shown.data(), shown.size())) + (cut ? "..." : "");
}

std::string Commas(uint64_t value) {
  std::string digits = std::to_string(value);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

}  // namespace dovetail::model
