#include "server/openai/responses_tools.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/openai/field_reader.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxText = size_t{1} << 20;

std::string TypeOf(const Json& tool) {
  const auto type = tool.is_object() ? tool.find("type") : tool.end();
  return tool.is_object() && type != tool.end() && type->is_string() ? type->get<std::string>() : "";
}

// `format`: of its input, or null.
void Offer(Json function, const std::string& path, ChatBody& chat, const Json* format = nullptr) {
  Json& all = chat.body["tools"];
  const std::string at = absl::StrCat("tools.", all.size());
  chat.names.Add(at, path);
  chat.names.Add(absl::StrCat(at, ".function"), path);
  chat.names.Add(absl::StrCat(at, ".format"), absl::StrCat(path, ".format"));
  all.push_back({{"type", "function"}, {"function", std::move(function)}});
  if (format != nullptr) all.back()["format"] = *format;
}

// `about`: what the namespace says of itself, in front of the function's own description.
absl::Status OfferFunction(const FieldReader& tool, const std::string& path, const std::string& group,
                           const std::string& about, ChatBody& chat) {
  Json function = Json::object();
  for (const char* name : {"name", "description", "parameters", "strict"})
    if (tool.Has(name)) function[name] = *tool.Find(name);
  if (!group.empty()) {
    DT_ASSIGN_OR_RETURN(const auto name, tool.String("name", kMaxText));
    DT_ASSIGN_OR_RETURN(const auto description, tool.String("description", kMaxText));
    if (!name || name->empty()) return BadField(tool.Path("name"), "is required");
    function["name"] = ShownName(group, *name);
    if (!about.empty()) function["description"] = absl::StrCat(about, "\n", description.value_or(""));
  }
  Offer(std::move(function), path, chat);
  return absl::OkStatus();
}

// What a model is told of the grammar that its input is held to; tools.cc checks it.
std::string AboutGrammar(const Json* format) {
  if (format == nullptr || TypeOf(*format) != "grammar") return "";
  const auto text = [format](const char* name) {
    const auto at = format->find(name);
    return at != format->end() && at->is_string() ? at->get<std::string>() : std::string();
  };
  return absl::StrCat("\nThe input follows this grammar (", text("syntax"), "):\n", text("definition"));
}

absl::Status OfferCustom(const FieldReader& tool, const std::string& path, ChatBody& chat) {
  const Json* const format = tool.Find("format");
  DT_ASSIGN_OR_RETURN(const auto name, tool.String("name", kMaxText));
  DT_ASSIGN_OR_RETURN(const auto description, tool.String("description", kMaxText));
  Json function = {{"description", absl::StrCat(description.value_or(""), AboutGrammar(format))},
                   {"parameters",
                    {{"type", "object"},
                     {"properties", {{"input", {{"type", "string"}}}}},
                     {"required", Json::array({"input"})},
                     {"additionalProperties", false}}}};
  if (name) function["name"] = *name;
  Offer(std::move(function), path, chat, format);
  return absl::OkStatus();
}

absl::Status OfferNamespace(const FieldReader& group, const std::string& path, ChatBody& chat) {
  DT_ASSIGN_OR_RETURN(const auto name, group.String("name", kMaxText));
  DT_ASSIGN_OR_RETURN(const auto description, group.String("description", kMaxText));
  if (!name || name->empty()) return BadField(group.Path("name"), "is required");
  const Json* tools = group.Find("tools");
  if (tools == nullptr || !tools->is_array()) return BadField(group.Path("tools"), "must be an array of functions");
  for (size_t i = 0; i < tools->size(); ++i) {
    const std::string at = absl::StrCat(path, ".tools.", i);
    const Json& tool = (*tools)[i];
    if (TypeOf(tool) != "function") return BadField(absl::StrCat(at, ".type"), "must be \"function\" in a namespace");
    DT_RETURN_IF_ERROR(OfferFunction(FieldReader(tool, at), at, *name, i == 0 ? description.value_or("") : "", chat));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ShownName(const std::string& group, const std::string& name) {
  return group.empty() ? name : absl::StrCat(group, "__", name);
}

absl::Status ToolsAsFunctions(const Json& tools, ChatBody& chat) {
  if (!tools.is_array()) return BadField("tools", "must be an array, not ", Describe(tools));
  chat.body["tools"] = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string path = absl::StrCat("tools.", i);
    if (!tools[i].is_object()) return BadField(path, "must be an object with type, not ", Describe(tools[i]));
    const FieldReader tool(tools[i], path);
    const std::string type = TypeOf(tools[i]);
    if (type == "function") {
      DT_RETURN_IF_ERROR(OfferFunction(tool, path, "", "", chat));
    } else if (type == "custom") {
      DT_RETURN_IF_ERROR(OfferCustom(tool, path, chat));
    } else if (type == "namespace") {
      DT_RETURN_IF_ERROR(OfferNamespace(tool, path, chat));
    } else {
      return BadField(absl::StrCat(path, ".type"), "must be \"function\", \"custom\" or \"namespace\", not ",
                      Describe(tool.Has("type") ? *tool.Find("type") : Json()),
                      ": this server runs no tools of its own (with Codex CLI, set web_search = \"disabled\")");
    }
  }
  return absl::OkStatus();
}

void ToolChoiceAsFunction(const Json& choice, ChatBody& chat) {
  chat.body["tool_choice"] = choice;
  chat.names.Add("tool_choice.function", "tool_choice");
  const std::string type = TypeOf(choice);
  if (type != "function" && type != "custom") return;
  Json name = choice.contains("name") ? choice["name"] : Json();
  const auto group = choice.find("namespace");
  if (name.is_string() && group != choice.end() && group->is_string())
    name = ShownName(group->get<std::string>(), name.get<std::string>());
  chat.body["tool_choice"] = {{"type", "function"}, {"function", {{"name", std::move(name)}}}};
}

Json InputAsArguments(const Json& input) { return Dump(Json{{"input", input}}); }

std::string InputOf(const std::string& arguments) {
  const auto parsed = ParseJson(arguments);
  if (!parsed.ok() || !parsed->is_object()) return arguments;
  const auto input = parsed->find("input");
  return parsed->size() == 1 && input != parsed->end() && input->is_string() ? input->get<std::string>() : arguments;
}

ClientTool ClientToolOf(const Json& tools, const std::string& shown) {
  if (!tools.is_array()) return {false, "", shown};
  const auto name_of = [](const Json& tool) {
    return tool.contains("name") && tool["name"].is_string() ? tool["name"].get<std::string>() : std::string();
  };
  for (const Json& tool : tools) {
    const std::string type = TypeOf(tool);
    if (type == "custom" && name_of(tool) == shown) return {true, "", shown};
    if (type != "namespace") continue;
    for (const Json& inner : tool["tools"])
      if (ShownName(name_of(tool), name_of(inner)) == shown) return {false, name_of(tool), name_of(inner)};
  }
  return {false, "", shown};
}

}  // namespace dovetail::server
