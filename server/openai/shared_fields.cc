#include "server/openai/shared_fields.h"

#include <algorithm>
#include <string>

#include "server/openai/api_error.h"

namespace dovetail::server {

absl::StatusOr<Json> SharedFields(const Json& body, std::span<const std::string_view> own,
                                  std::span<const RefusedField> refused) {
  Json shared = Json::object();
  for (const auto& [name, value] : body.items()) {
    if (std::find(own.begin(), own.end(), name) != own.end()) continue;
    const auto known =
        std::find_if(refused.begin(), refused.end(), [&](const RefusedField& field) { return field.name == name; });
    if (known == refused.end()) {
      shared[name] = value;
    } else if (!value.is_null() && (known->harmless.empty() || Dump(value) != known->harmless)) {
      return BadField(name, std::string(known->why));
    }
  }
  return shared;
}

}  // namespace dovetail::server
