#include "server/openai/schema_merge.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "server/openai/api_error.h"
#include "server/openai/field_reader.h"

namespace dovetail::server {
namespace {

absl::Status CheckPart(const SchemaPart& part) {
  static const auto& kMerged = *new std::set<std::string>{"type", "properties", "required", "additionalProperties"};
  static const auto& kNotes = *new std::set<std::string>{"title",   "description", "default",  "examples", "$comment",
                                                         "$schema", "deprecated",  "readOnly", "writeOnly"};
  const Json& schema = *part.schema;
  for (const auto& [key, value] : schema.items())
    if (!kMerged.contains(key) && !kNotes.contains(key))
      return BadField(absl::StrCat(part.path, ".", key), "is not enforced in a part of allOf; leave it out");
  if (schema.contains("type") && schema.at("type") != "object")
    return BadField(absl::StrCat(part.path, ".type"), Describe(schema.at("type")),
                    ": several schemas of allOf are enforced for objects only");
  return absl::OkStatus();
}

absl::Status AddProperties(const SchemaPart& part, Json& properties) {
  if (!part.schema->contains("properties")) return absl::OkStatus();
  for (const auto& [name, schema] : part.schema->at("properties").items()) {
    if (properties.contains(name) && properties.at(name) != schema)
      return BadField(absl::StrCat(part.path, ".properties.", name),
                      "is described by another schema of allOf in another way, which is not enforced");
    properties[name] = schema;
  }
  return absl::OkStatus();
}

void AddRequired(const SchemaPart& part, Json& required) {
  if (!part.schema->contains("required")) return;
  for (const Json& name : part.schema->at("required"))
    if (std::find(required.begin(), required.end(), name) == required.end()) required.push_back(name);
}

absl::Status CheckOthers(const SchemaPart& part, const Json& properties) {
  if (!part.schema->contains("additionalProperties")) return absl::OkStatus();
  const Json& others = part.schema->at("additionalProperties");
  if (others == true) return absl::OkStatus();
  const size_t own = part.schema->contains("properties") ? part.schema->at("properties").size() : 0;
  if (others == false && own == properties.size()) return absl::OkStatus();
  return BadField(absl::StrCat(part.path, ".additionalProperties"),
                  "keeps out what other schemas of allOf describe; leave it out");
}

}  // namespace

absl::StatusOr<Json> MergeObjects(const std::vector<SchemaPart>& parts) {
  Json properties = Json::object(), required = Json::array();
  for (const SchemaPart& part : parts) {
    DT_RETURN_IF_ERROR(CheckPart(part));
    DT_RETURN_IF_ERROR(AddProperties(part, properties));
    AddRequired(part, required);
  }
  for (const SchemaPart& part : parts) DT_RETURN_IF_ERROR(CheckOthers(part, properties));
  Json merged = {{"type", "object"}};
  if (properties.empty()) return merged;
  merged["properties"] = std::move(properties);
  merged["required"] = std::move(required);
  return merged;
}

}  // namespace dovetail::server
