#include "server/cli/kv_taken.h"

#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/cli/kv_capacity.h"

namespace dovetail::cli {
namespace {

constexpr const char* kMarker = "--kv-capacity auto: bytes for KV: ";

}  // namespace

std::string KvTakenLine(uint64_t bytes) { return absl::StrCat(kMarker, bytes); }

void KvTaken::OnLine(const std::string& worker, const std::string& line) {
  uint64_t bytes = 0;
  const size_t at = line.find(kMarker);
  if (at == std::string::npos || !absl::SimpleAtoi(line.substr(at + std::strlen(kMarker)), &bytes)) return;
  MutexLock lock(mutex_);
  taken_.emplace(worker, bytes);
}

std::optional<uint64_t> KvTaken::By(const std::string& worker) const {
  MutexLock lock(mutex_);
  const auto taken = taken_.find(worker);
  return taken == taken_.end() ? std::nullopt : std::optional(taken->second);
}

KvTaken::Arguments KvTaken::Again(const std::string& worker, Arguments arguments) const {
  const std::optional<uint64_t> taken = By(worker);
  if (!taken) return arguments;
  const KvCapacityFlags kv = TakenBefore({}, *taken);
  const std::map<std::string, std::string> values = {
      {"--kv-leave", kv.leave}, {"--kv-most", kv.most}, {"--kv-sharers", std::to_string(kv.sharers)}};
  for (size_t i = 1; i < arguments.size(); ++i)
    if (const auto value = values.find(arguments[i - 1]); value != values.end()) arguments[i] = value->second;
  return arguments;
}

}  // namespace dovetail::cli
