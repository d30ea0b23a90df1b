#include "model/pooling.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "model/formats/gguf.h"
#include "model/formats/json_file.h"

namespace dovetail::model {
namespace fs = std::filesystem;
namespace {

// llama.cpp's enumeration. Rankers have a head of their own.
absl::StatusOr<std::string> PoolingOfGguf(const GgufFile& gguf) {
  constexpr const char* kNames[] = {"", "mean", "cls", "last", "rank"};
  for (const auto& [key, value] : gguf.metadata()) {
    if (!absl::EndsWith(absl::string_view(key.data(), key.size()), kGgufPoolingSuffix)) continue;
    DT_ASSIGN_OR_RETURN(const auto kind, gguf.Int(key));
    if (kind && *kind >= 0 && *kind <= 4) return std::string(kNames[*kind]);
    return absl::StrCat("pooling_type ", kind.value_or(-1));
  }
  return std::string();
}

absl::StatusOr<std::string> PoolingOfJson(const fs::path& path) {
  DT_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(path));
  if (!json.is_object()) return InvalidArgument(kPoolingFile, ": is not a JSON object");
  std::vector<std::string> modes;
  for (const auto& [key, value] : json.items())
    if (absl::StartsWith(key, "pooling_mode_") && value.is_boolean() && value.get<bool>()) modes.push_back(key);
  const std::pair<const char*, const char*> known[] = {
      {"pooling_mode_mean_tokens", "mean"}, {"pooling_mode_lasttoken", "last"}, {"pooling_mode_cls_token", "cls"}};
  for (const auto& [mode, name] : known)
    if (modes == std::vector<std::string>{mode}) return std::string(name);
  return absl::StrJoin(modes, " and ");
}

}  // namespace

absl::StatusOr<std::string> PoolingOf(const Checkpoint& checkpoint) {
  if (checkpoint.gguf() != nullptr) return PoolingOfGguf(*checkpoint.gguf());
  for (const char* name : {kPoolingFile, kFlatPoolingFile}) {
    const fs::path path = checkpoint.folder() / name;
    std::error_code error;
    if (fs::is_regular_file(path, error)) return PoolingOfJson(path);
  }
  return std::string();
}

}  // namespace dovetail::model
