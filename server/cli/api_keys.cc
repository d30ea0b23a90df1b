#include "server/cli/api_keys.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/log.h"

namespace dovetail::cli {
namespace {

using server::ApiKey;

constexpr int kMostKeys = 4096;
constexpr size_t kMostLineBytes = 4096;

std::vector<std::string> Words(const std::string& text) {
  return absl::StrSplit(text, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty());
}

absl::StatusOr<ApiKey> KeyOfLine(const std::string& where, const std::string& line) {
  const std::vector<std::string> words = Words(line);
  if (line.size() > kMostLineBytes || words.size() > 2)
    return InvalidArgument(where, ": a line is a key, or a key and its tenant's name");
  ApiKey key(words[0], words.size() == 2 ? words[1] : "");
  DT_RETURN_IF_ERROR(server::CheckApiKey(where, key));
  return key;
}

absl::Status ReadFile(const std::string& flag, const std::string& path, std::vector<ApiKey>& keys) {
  struct stat info {};
  std::ifstream in(path);
  if (!in.good() || stat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode))
    return NotFound(flag, ": ", path, " cannot be read; give a file with a key a line that this user may read");
  if ((info.st_mode & S_IWOTH) != 0)
    return FailedPrecondition(flag, ": everybody may write ", path, " and so add a key; chmod 600 it");
  const size_t before = keys.size();
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const std::vector<std::string> words = Words(line);
    if (words.empty() || words[0][0] == '#') continue;
    if (keys.size() >= kMostKeys) return InvalidArgument(flag, ": ", path, " has more than ", kMostKeys, " keys");
    DT_ASSIGN_OR_RETURN(ApiKey key, KeyOfLine(absl::StrCat(flag, ": ", path, " line ", number), line));
    keys.push_back(std::move(key));
  }
  if (keys.size() == before) return InvalidArgument(flag, ": ", path, " holds no key; write one a line");
  return absl::OkStatus();
}

absl::Status ReadVariable(const std::string& name, std::vector<ApiKey>& keys) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return absl::OkStatus();
  const std::vector<std::string> words = Words(value);
  if (words.empty()) return InvalidArgument(name, ": is set and holds no key; unset it to serve everybody");
  for (const std::string& word : words) {
    DT_RETURN_IF_ERROR(server::CheckApiKey(name, word));
    keys.emplace_back(word);
  }
  return absl::OkStatus();
}

}  // namespace

KeySources ApiKeySources() { return {"--api-key", "--api-key-file", {"DOVETAIL_API_KEY", "VLLM_API_KEY"}, {}, {}}; }

KeySources MetricsKeySources() {
  return {"--metrics-api-key", "--metrics-api-key-file", {"DOVETAIL_METRICS_API_KEY"}, {}, {}};
}

void AddKeyFlags(CLI::App& command, KeySources& sources, const std::string& what_for) {
  command
      .add_option(
          sources.flag, sources.keys,
          absl::StrCat(what_for,
                       "; may be repeated. Other users of this host can read it in the process list: "
                       "prefer ",
                       sources.file_flag, ", or ", absl::StrJoin(sources.variables, " or "), " in the environment"))
      ->allow_extra_args(false)
      ->type_name("KEY")
      ->group("API");
  command
      .add_option(
          sources.file_flag, sources.files,
          "A file with such keys, one a line; after a space the name of its tenant, if it shares one with other "
          "keys. Lines that begin with # are comments; may be repeated")
      ->allow_extra_args(false)
      ->type_name("FILE")
      ->group("API");
}

absl::StatusOr<std::vector<ApiKey>> ReadKeys(const KeySources& sources) {
  std::vector<ApiKey> keys;
  for (const std::string& key : sources.keys) {
    DT_RETURN_IF_ERROR(server::CheckApiKey(sources.flag, key));
    keys.emplace_back(key);
  }
  for (const std::string& file : sources.files) DT_RETURN_IF_ERROR(ReadFile(sources.file_flag, file, keys));
  for (const std::string& name : sources.variables) DT_RETURN_IF_ERROR(ReadVariable(name, keys));
  DT_RETURN_IF_ERROR(server::CheckTenants(sources.flag, keys));
  return keys;
}

void WarnOfReadableKeys(const KeySources& sources) {
  if (!sources.keys.empty())
    LogWarning(sources.flag, ": other users of this host can read the key in the process list; give it with ",
               sources.file_flag, " or in ", sources.variables.front());
  for (const std::string& file : sources.files) {
    struct stat info {};
    if (stat(file.c_str(), &info) == 0 && (info.st_mode & (S_IRGRP | S_IROTH | S_IWGRP)) != 0)
      LogWarning(sources.file_flag, ": other users of this host may open ", file, " (mode ",
                 absl::StrFormat("%04o", info.st_mode & 07777), "); chmod 600 it");
  }
}

}  // namespace dovetail::cli
