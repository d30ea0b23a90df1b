#include "model/chat_template/template_source.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {
namespace {

using nlohmann::ordered_json;

const NamedTemplate* Find(const TemplateSources& sources, std::string_view name) {
  for (const NamedTemplate& entry : sources.templates) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

absl::Status ReadTemplates(const ordered_json& json, TemplateSources& sources) {
  if (json.is_null()) return absl::OkStatus();
  if (json.is_string()) {
    sources.Set("default", json.get<std::string>());
    return absl::OkStatus();
  }
  if (json.is_object()) {
    for (const auto& [name, source] : json.items()) {
      if (!source.is_string()) return InvalidArgument("chat_template.", name, " must be a string");
      sources.Set(name, source.get<std::string>());
    }
    return absl::OkStatus();
  }
  if (!json.is_array()) return InvalidArgument("chat_template must be a string or a list of {name, template}");
  for (size_t i = 0; i < json.size(); ++i) {
    const ordered_json& entry = json[i];
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() || !entry.contains("template") ||
        !entry["template"].is_string()) {
      return InvalidArgument("chat_template[", i, "] must have the strings name and template");
    }
    sources.Set(entry["name"].get<std::string>(), entry["template"].get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status ReadToken(const ordered_json& config, const char* field, std::optional<std::string>& token) {
  if (!config.contains(field) || config[field].is_null()) return absl::OkStatus();
  const ordered_json& value = config[field];
  const ordered_json& text = value.is_object() && value.contains("content") ? value["content"] : value;
  if (!text.is_string()) return InvalidArgument(field, " must be a string or an object with the string content");
  token = text.get<std::string>();
  return absl::OkStatus();
}

}  // namespace

void TemplateSources::Set(std::string name, std::string source) {
  for (NamedTemplate& entry : templates) {
    if (entry.name == name) {
      entry.source = std::move(source);
      return;
    }
  }
  templates.push_back({std::move(name), std::move(source)});
}

absl::StatusOr<TemplateSources> ReadTokenizerConfigTemplates(std::string_view json) {
  const auto config = ordered_json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (config.is_discarded() || !config.is_object()) return InvalidArgument("not a JSON object");
  TemplateSources sources;
  if (config.contains("chat_template")) DT_RETURN_IF_ERROR(ReadTemplates(config["chat_template"], sources));
  DT_RETURN_IF_ERROR(ReadToken(config, "bos_token", sources.bos_token));
  DT_RETURN_IF_ERROR(ReadToken(config, "eos_token", sources.eos_token));
  return sources;
}

absl::StatusOr<std::string> SelectTemplate(const TemplateSources& sources, bool has_tools) {
  if (has_tools) {
    if (const NamedTemplate* found = Find(sources, "tool_use")) return found->source;
  }
  if (const NamedTemplate* found = Find(sources, "default")) return found->source;
  if (sources.templates.size() == 1) return sources.templates[0].source;
  if (sources.empty()) return NotFound("the model brings no chat template; choose one with --chat-template");
  std::string names;
  for (const NamedTemplate& entry : sources.templates) absl::StrAppend(&names, names.empty() ? "" : ", ", entry.name);
  return NotFound("none of the model's chat templates is called default: ", names, "; choose one with --chat-template");
}

}  // namespace dovetail::model
