#include "server/openai/tools.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "server/openai/answers/cursor.h"
#include "server/openai/answers/marks.h"
#include "server/openai/field_reader.h"
#include "server/openai/json_schema.h"
#include "server/openai/lark.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxDescription = size_t{1} << 20;
constexpr size_t kMaxCallId = 256;

struct Offered {
  Tool tool;
  std::string path;            // of its function
  std::optional<bool> strict;  // what the client says
  bool has_grammar = false;    // of its input
};

absl::Status CheckName(const std::string& name, const std::string& path) {
  if (IsFunctionName(name)) return absl::OkStatus();
  return BadField(path, name.empty() ? "is empty" : "has characters that names of functions do not have, or too many",
                  "; 1 to ", kMaxFunctionName, " of A-Z, a-z, 0-9, _, - and . are allowed");
}

absl::StatusOr<Json> ParametersOf(const FieldReader& function) {
  const Json* given = function.Find("parameters");
  if (given == nullptr) return Json{{"type", "object"}, {"properties", Json::object()}};
  const std::string path = function.Path("parameters");
  if (!given->is_object()) return BadField(path, "must be a JSON schema (an object), not ", Describe(*given));
  const auto type = given->find("type");
  if (type != given->end() && *type != "object")
    return BadField(absl::StrCat(path, ".type"), "must be \"object\", not ", Describe(*type), ": arguments have names");
  return *given;
}

// The grammar of a tool's `input`, where it has one: {type: grammar, syntax: lark or regex, definition}.
absl::StatusOr<std::string> InputGrammarOf(const FieldReader& tool, const CallFormat* calls) {
  const Json* given = tool.Find("format");
  if (given == nullptr) return "";
  const std::string path = tool.Path("format");
  if (!given->is_object()) return BadField(path, "must be an object, not ", Describe(*given));
  const FieldReader format(*given, path);
  DT_ASSIGN_OR_RETURN(const auto type, format.String("type", 64));
  if (type == "text") return "";
  if (type != "grammar") return BadField(format.Path("type"), "must be text or grammar");
  if (calls != nullptr && !calls->json_arguments)
    return BadField(format.Path("type"), "must be text: the calls of this model's format (", std::string(calls->name),
                    ") have marks that a grammar's text might hold");
  DT_ASSIGN_OR_RETURN(const auto syntax, format.String("syntax", 64));
  DT_ASSIGN_OR_RETURN(const auto definition, format.String("definition", kMaxDescription));
  if (!definition) return BadField(format.Path("definition"), "is required");
  if (syntax == "lark") return EnforceableLark(*definition, format.Path("definition"), gbnf::Spelling::kJson);
  if (syntax == "regex") return EnforceableLarkRegex(*definition, format.Path("definition"), gbnf::Spelling::kJson);
  return BadField(format.Path("syntax"), "must be lark or regex");
}

// Adds to `shown` what the template gets of it: all but `strict`, which is no business of the model's, and with a
// description, which many templates write without a look.
absl::StatusOr<Offered> ParseTool(const Json& value, const std::string& path, const CallFormat* calls, Json& shown) {
  if (!value.is_object()) return BadField(path, "must be an object with type and function, not ", Describe(value));
  const FieldReader reader(value, path);
  DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
  if (type != "function")
    return BadField(reader.Path("type"), "must be \"function\": this server has no tools of its own");
  const Json* inner = reader.Find("function");
  if (inner == nullptr || !inner->is_object())
    return BadField(reader.Path("function"), "must be an object with name and parameters");
  const FieldReader function(*inner, reader.Path("function"));
  DT_ASSIGN_OR_RETURN(const auto name, function.String("name", kMaxDescription));
  if (!name) return BadField(function.Path("name"), "is required");
  DT_RETURN_IF_ERROR(CheckName(*name, function.Path("name")));
  DT_RETURN_IF_ERROR(function.String("description", kMaxDescription).status());
  DT_RETURN_IF_ERROR(function.Bool("strict", false).status());
  Offered offered{{*name, {}}, function.Path("parameters"), {}};
  if (const Json* strict = function.Find("strict")) offered.strict = strict->get<bool>();
  DT_ASSIGN_OR_RETURN(offered.tool.parameters, ParametersOf(function));
  DT_ASSIGN_OR_RETURN(offered.tool.input_grammar, InputGrammarOf(reader, calls));
  offered.has_grammar = !offered.tool.input_grammar.empty();
  Json copy = value;
  copy.erase("format");
  copy["function"].erase("strict");
  copy["function"]["parameters"] = offered.tool.parameters;
  if (function.Find("description") == nullptr) copy["function"]["description"] = "";
  shown.push_back(std::move(copy));
  return offered;
}

absl::StatusOr<std::vector<Offered>> ParseOffered(const Json& value, const CallFormat* calls, Json& shown) {
  if (!value.is_array()) return BadField("tools", "must be an array of functions, not ", Describe(value));
  if (value.size() > kMaxTools) return BadField("tools", value.size(), " tools; at most ", kMaxTools, " are allowed");
  std::vector<Offered> all;
  for (const Json& one : value) {
    const std::string path = absl::StrCat("tools.", all.size());
    DT_ASSIGN_OR_RETURN(Offered offered, ParseTool(one, path, calls, shown));
    for (const Offered& other : all)
      if (other.tool.name == offered.tool.name)
        return BadField(absl::StrCat(path, ".function.name"), Describe(Json(offered.tool.name)),
                        " is the name of an earlier tool, too");
    all.push_back(std::move(offered));
  }
  return all;
}

struct Choice {
  bool none = false, required = false;
  std::string function;  // that alone
};

absl::StatusOr<Choice> ParseChoice(const Json* value, const std::vector<Offered>& offered) {
  const std::string param = "tool_choice";
  Choice choice;
  if (value == nullptr) return choice;
  if (value->is_string()) {
    const auto& text = value->get_ref<const std::string&>();
    choice.none = text == "none";
    choice.required = text == "required";
    if (text != "none" && text != "auto" && text != "required")
      return BadField(param, "must be none, auto, required or {type: function, function: {name}}, not ",
                      Describe(*value));
    return choice;
  }
  if (!value->is_object()) return BadField(param, "must be a string or an object, not ", Describe(*value));
  const FieldReader reader(*value, param);
  DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
  if (type != "function") return BadField(param + ".type", "must be \"function\"");
  const Json* inner = reader.Find("function");
  if (inner == nullptr || !inner->is_object()) return BadField(param + ".function", "must be an object with name");
  const FieldReader function(*inner, param + ".function");
  DT_ASSIGN_OR_RETURN(const auto name, function.String("name", kMaxDescription));
  if (!name) return BadField(function.Path("name"), "is required");
  const bool known =
      std::any_of(offered.begin(), offered.end(), [&](const auto& one) { return one.tool.name == *name; });
  if (!known) return BadField(function.Path("name"), "is not the name of one of the tools");
  choice.required = true;
  choice.function = *name;
  return choice;
}

absl::Status WithHint(const absl::Status& status, std::string_view hint) {
  absl::Status hinted(status.code(), absl::StrCat(status.message(), absl::string_view(hint.data(), hint.size())));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { hinted.SetPayload(url, payload); });
  return hinted;
}

// What a call's arguments are held to.
absl::StatusOr<Json> Enforced(const Offered& offered, bool must) {
  const Json any = {{"type", "object"}, {"additionalProperties", Json::object()}};
  if (offered.strict == false) return any;
  Json schema = offered.tool.parameters;
  if (!schema.contains("type") && !schema.contains("$ref") && !schema.contains("anyOf")) schema["type"] = "object";
  auto enforceable = EnforceableSchema(schema, offered.path);
  if (enforceable.ok()) return enforceable;
  if (!must && offered.strict != true) return any;
  return WithHint(enforceable.status(), "; or send strict: false with the function for any JSON object");
}

}  // namespace

absl::StatusOr<ToolUse> ParseTools(const Json& body, const ServedModel& model, bool with_format, Json& shown) {
  const FieldReader reader(body);
  ToolUse use;
  shown = Json::array();
  std::vector<Offered> offered;
  if (const Json* tools = reader.Find("tools")) {
    DT_ASSIGN_OR_RETURN(offered, ParseOffered(*tools, model.calls, shown));
  }
  DT_ASSIGN_OR_RETURN(const Choice choice, ParseChoice(reader.Find("tool_choice"), offered));
  DT_ASSIGN_OR_RETURN(use.parallel, reader.Bool("parallel_tool_calls", true));
  if (offered.empty() && reader.Has("tool_choice") && !choice.none)
    return BadField("tool_choice", "only allowed when there are tools");
  if (offered.empty() || choice.none) {
    shown = nullptr;
    return use;
  }
  if (model.calls == nullptr)
    return BadField("tools",
                    "the chat template of this model writes calls in no format that is known here; if the "
                    "model knows one, start the server with --tool-call-parser");
  use.required = choice.required;
  const bool strict = std::any_of(offered.begin(), offered.end(),
                                  [](const Offered& one) { return one.strict == true || one.has_grammar; });
  std::vector<Tool> enforced;
  for (const Offered& one : offered) {
    use.tools.push_back(one.tool);
    if (!choice.required && !strict && !with_format) continue;
    if (!choice.function.empty() && one.tool.name != choice.function) continue;
    DT_ASSIGN_OR_RETURN(Json schema, Enforced(one, choice.required));
    enforced.push_back({one.tool.name, std::move(schema), one.tool.input_grammar});
  }
  if (enforced.empty()) return use;
  use.param = choice.required ? "tool_choice" : "tools";
  use.grammar = model.calls->grammar(enforced, use.parallel && choice.function.empty(), MarksOf(model));
  return use;
}

absl::StatusOr<Json> ParseHistoricCalls(const Json& value, const std::string& path,
                                        std::vector<std::pair<std::string, std::string>>& ids) {
  if (!value.is_array()) return BadField(path, "must be an array of calls, not ", Describe(value));
  if (value.size() > kMaxTools) return BadField(path, value.size(), " calls; at most ", kMaxTools, " are allowed");
  Json calls = Json::array();
  for (const Json& one : value) {
    const std::string at = absl::StrCat(path, ".", calls.size());
    if (!one.is_object()) return BadField(at, "must be an object with id, type and function, not ", Describe(one));
    const FieldReader reader(one, at);
    DT_ASSIGN_OR_RETURN(const auto id, reader.String("id", kMaxCallId));
    if (!id || id->empty()) return BadField(reader.Path("id"), "is required");
    for (const auto& known : ids)
      if (known.first == *id) return BadField(reader.Path("id"), "is the id of an earlier call, too");
    DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
    if (type && *type != "function") return BadField(reader.Path("type"), "must be \"function\"");
    const Json* inner = reader.Find("function");
    if (inner == nullptr || !inner->is_object())
      return BadField(reader.Path("function"), "must be an object with name and arguments");
    const FieldReader function(*inner, reader.Path("function"));
    DT_ASSIGN_OR_RETURN(const auto name, function.String("name", kMaxDescription));
    if (!name) return BadField(function.Path("name"), "is required");
    DT_RETURN_IF_ERROR(CheckName(*name, function.Path("name")));
    const Json* arguments = function.Find("arguments");
    if (arguments != nullptr && !arguments->is_string())
      return BadField(function.Path("arguments"), "must be a string that holds a JSON object, not ",
                      Describe(*arguments));
    Json given = arguments == nullptr || *arguments == "" ? Json::object() : *arguments;
    if (given.is_string()) {  // what a model wrote need not be JSON; its template sees it as it was
      auto parsed = ParseJson(given.get_ref<const std::string&>());
      if (parsed.ok() && parsed->is_object()) given = *std::move(parsed);
    }
    ids.emplace_back(*id, *name);
    calls.push_back(
        {{"id", *id}, {"type", "function"}, {"function", {{"name", *name}, {"arguments", std::move(given)}}}});
  }
  return calls;
}

}  // namespace dovetail::server
