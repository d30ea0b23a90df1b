#include "server/http/unknown_fields.h"

#include <map>
#include <utility>

#include "base/log.h"
#include "server/http/openapi.h"
#include "server/openai/unsupported_fields.h"

namespace dovetail::server {
namespace {

std::set<std::string> KnownOf(RouteId route) {
  std::set<std::string> known = FieldsOf(route);
  for (const UnsupportedField& field : UnsupportedFields()) known.emplace(field.name);
  for (const char* name : {"verbosity", "n_cmpl", "best_of", "echo", "logprobs", "n"}) known.emplace(name);
  return known;
}

// Null: the route's fields are not all listed.
const std::set<std::string>* Known(RouteId route) {
  static const std::map<RouteId, std::set<std::string>> kAll = [] {
    std::map<RouteId, std::set<std::string>> all;
    for (const RouteId id : {RouteId::kCompletions, RouteId::kChat, RouteId::kLlama, RouteId::kInfill})
      all.emplace(id, KnownOf(id));
    return all;
  }();
  const auto at = kAll.find(route);
  return at == kAll.end() ? nullptr : &at->second;
}

}  // namespace

void UnknownFields::Note(const Route& route, const Json& body) {
  const std::set<std::string>* const known = Known(route.id);
  if (known == nullptr || !body.is_object()) return;
  for (const auto& [name, value] : body.items()) {
    if (value.is_null() || known->contains(name)) continue;
    const std::string shown = Dump(Json(name.substr(0, kMaxNameBytes)));
    {
      MutexLock lock(mutex_);
      if (told_.size() >= kMaxNames || !told_.insert(shown).second) continue;
    }
    LogWarning(std::string(route.path), ": the field ", shown, " is not known and was ignored (this is said once)");
  }
}

}  // namespace dovetail::server
