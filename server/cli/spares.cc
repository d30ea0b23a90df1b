#include "server/cli/spares.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dovetail::cli {
namespace {

bool HasValue(const std::map<std::string, Spares::Arguments>& all, const Spares::Arguments& value) {
  return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.second == value; });
}

}  // namespace

void Spares::AddWorker(const std::string& worker, const Arguments& arguments) {
  const bool known = HasValue(workers_, arguments);
  workers_[worker] = arguments;
  for (int i = 0; i < count_ && !known; ++i) spares_[absl::StrCat("spare-", ++named_)] = arguments;
}

std::vector<std::string> Spares::names() const {
  std::vector<std::string> names;
  for (const auto& [name, arguments] : spares_) names.push_back(name);
  return names;
}

const Spares::Arguments* Spares::ArgumentsOf(const std::string& spare) const {
  const auto found = spares_.find(spare);
  return found == spares_.end() ? nullptr : &found->second;
}

void Spares::Ready(const std::string& spare) {
  if (spares_.contains(spare)) ready_.insert(spare);
}

void Spares::NotReady(const std::string& spare) { ready_.erase(spare); }

std::optional<std::string> Spares::Take(const std::string& worker) {
  const auto place = workers_.find(worker);
  if (place == workers_.end()) return std::nullopt;
  const auto spare =
      std::find_if(ready_.begin(), ready_.end(), [&](const auto& name) { return spares_.at(name) == place->second; });
  if (spare == ready_.end()) return std::nullopt;
  return std::move(ready_.extract(spare).value());
}

std::vector<std::string> Spares::RemoveWorker(const std::string& worker) {
  std::vector<std::string> unneeded;
  const auto removed = workers_.extract(worker);
  if (removed.empty() || HasValue(workers_, removed.mapped())) return unneeded;
  for (const auto& [name, arguments] : spares_)
    if (arguments == removed.mapped()) unneeded.push_back(name);
  for (const std::string& name : unneeded) {
    spares_.erase(name);
    ready_.erase(name);
  }
  return unneeded;
}

}  // namespace dovetail::cli
