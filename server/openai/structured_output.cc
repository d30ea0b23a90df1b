#include "server/openai/structured_output.h"

#include "server/openai/api_error.h"
#include "server/openai/field_reader.h"
#include "server/openai/gbnf.h"
#include "server/openai/json_schema.h"
#include "server/openai/regex_check.h"
#include "server/openai/structural_tag.h"

namespace dovetail::server {
namespace {

using grammar::Kind;
using grammar::SourceOf;

// One way to say what the text may be.
struct Constraint {
  std::string param;
  std::string source;
};

absl::StatusOr<Json> SchemaOf(const Json& value, const std::string& param) {
  if (!value.is_string()) return value;
  auto parsed = ParseJson(value.get_ref<const std::string&>());
  if (!parsed.ok()) return BadField(param, std::string(parsed.status().message()));
  return parsed;
}

absl::StatusOr<Constraint> FromSchema(const Json& value, const std::string& param) {
  DT_ASSIGN_OR_RETURN(const Json schema, SchemaOf(value, param));
  DT_ASSIGN_OR_RETURN(const Json enforced, EnforceableSchema(schema, param));
  return Constraint{param, SourceOf(Kind::kJsonSchema, Dump(enforced))};
}

absl::StatusOr<Constraint> FromRegex(const Json& value, const std::string& param) {
  if (!value.is_string()) return BadField(param, "must be a string, not ", Describe(value));
  DT_ASSIGN_OR_RETURN(const auto regex, EnforceableRegex(value.get<std::string>(), RegexUse::kWholeText, param));
  return Constraint{param, SourceOf(Kind::kRegex, regex)};
}

absl::StatusOr<Constraint> FromGbnf(const Json& value, const std::string& param) {
  if (!value.is_string()) return BadField(param, "must be a string, not ", Describe(value));
  DT_ASSIGN_OR_RETURN(const auto rules, EnforceableGbnf(value.get<std::string>(), param));
  return Constraint{param, SourceOf(Kind::kEbnf, rules)};
}

absl::StatusOr<Constraint> FromTag(const Json& value, const std::string& param) {
  DT_ASSIGN_OR_RETURN(const auto tag, EnforceableTag(value, param));
  return Constraint{param, SourceOf(Kind::kStructuralTag, tag)};
}

// A text as a terminal of xgrammar's EBNF.
std::string Terminal(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + '"';
}

absl::StatusOr<Constraint> FromChoices(const Json& value, const std::string& param) {
  if (!value.is_array() || value.empty()) return BadField(param, "must be an array of at least one string");
  if (value.size() > kMaxGuidedChoices)
    return BadField(param, value.size(), " choices; at most ", kMaxGuidedChoices, " are allowed");
  std::string rule = "root ::= ";
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string path = absl::StrCat(param, ".", i);
    if (!value[i].is_string()) return BadField(path, "must be a string, not ", Describe(value[i]));
    const auto& text = value[i].get_ref<const std::string&>();
    if (text.empty()) return BadField(path, "is empty");
    for (const char c : text)
      if ((c >= 0 && c < ' ' && c != '\n' && c != '\r' && c != '\t') || c == 127)
        return BadField(path, "holds a control character");
    absl::StrAppend(&rule, i > 0 ? " | " : "", Terminal(text));
  }
  return Constraint{param, SourceOf(Kind::kEbnf, rule)};
}

absl::StatusOr<Constraint> AnyObject(const std::string& param) { return FromSchema(Json{{"type", "object"}}, param); }

// nullopt: it asks for nothing.
absl::StatusOr<std::optional<Constraint>> FromResponseFormat(const Json& value) {
  const std::string param = "response_format";
  if (!value.is_object()) return BadField(param, "must be an object, not ", Describe(value));
  const FieldReader reader(value, param);
  DT_ASSIGN_OR_RETURN(const auto type, reader.String("type", 64));
  if (type == "text") return std::nullopt;
  if (type == "json_object") {
    if (reader.Has("schema")) return FromSchema(*reader.Find("schema"), param + ".schema");
    return AnyObject(param);
  }
  if (type == "grammar") {
    if (!reader.Has("grammar")) return BadField(param + ".grammar", "is required: a string in GBNF");
    return FromGbnf(*reader.Find("grammar"), param + ".grammar");
  }
  if (type == "structural_tag") return FromTag(value, param);
  if (type != "json_schema")
    return BadField(param + ".type", "must be text, json_object, json_schema, grammar or structural_tag");
  const std::string inner = param + ".json_schema";
  const Json* spec = reader.Find("json_schema");
  if (spec == nullptr || !spec->is_object()) return BadField(inner, "is required: an object with name and schema");
  const FieldReader fields(*spec, inner);
  DT_RETURN_IF_ERROR(fields.String("name", 256).status());
  DT_RETURN_IF_ERROR(fields.String("description", 65536).status());
  DT_RETURN_IF_ERROR(fields.Bool("strict", true).status());  // both are enforced
  if (!fields.Has("schema")) return BadField(inner + ".schema", "is required");
  return FromSchema(*fields.Find("schema"), inner + ".schema");
}

absl::StatusOr<std::optional<Constraint>> FromStructuredOutputs(const Json& value) {
  const std::string param = "structured_outputs";
  if (!value.is_object()) return BadField(param, "must be an object, not ", Describe(value));
  std::optional<Constraint> chosen;
  for (const auto& [key, one] : value.items()) {
    const std::string path = absl::StrCat(param, ".", key);
    if (one.is_null() || one == false) continue;
    if (chosen) return BadField(path, "cannot stand together with ", chosen->param);
    if (key == "json") {
      DT_ASSIGN_OR_RETURN(chosen, FromSchema(one, path));
    } else if (key == "regex") {
      DT_ASSIGN_OR_RETURN(chosen, FromRegex(one, path));
    } else if (key == "choice") {
      DT_ASSIGN_OR_RETURN(chosen, FromChoices(one, path));
    } else if (key == "grammar") {
      DT_ASSIGN_OR_RETURN(chosen, FromGbnf(one, path));
    } else if (key == "json_object") {
      DT_ASSIGN_OR_RETURN(chosen, AnyObject(path));
    } else if (key == "structural_tag") {
      DT_ASSIGN_OR_RETURN(chosen, FromTag(one, path));
    } else {
      return BadField(path, "is not supported; use json, json_object, regex, choice, grammar or structural_tag");
    }
  }
  return chosen;
}

absl::StatusOr<std::optional<Constraint>> FromField(const std::string& name, const Json& value) {
  if (name == "response_format") return FromResponseFormat(value);
  if (name == "structured_outputs") return FromStructuredOutputs(value);
  if (name == "guided_regex") return FromRegex(value, name);
  if (name == "guided_choice") return FromChoices(value, name);
  if (name == "grammar" && value == "") return std::nullopt;  // llama-server's clients send it always
  if (name == "grammar" || name == "guided_grammar") return FromGbnf(value, name);
  if (name == "json_schema" && value.is_object() && value.empty()) return std::nullopt;
  return FromSchema(value, name);
}

}  // namespace

absl::Status ParseStructuredOutput(const Json& body, const ServedModel& model, GenerationFields& fields) {
  const FieldReader reader(body);
  for (const char* name : {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                           "guided_grammar", "json_schema", "grammar"}) {
    const Json* value = reader.Find(name);
    if (value == nullptr) continue;
    DT_ASSIGN_OR_RETURN(auto constraint, FromField(name, *value));
    if (!constraint) continue;
    if (!fields.grammar.empty()) return BadField(name, "cannot stand together with ", fields.grammar_param);
    if (constraint->source.size() > proto::kMaxGrammar)
      return BadField(constraint->param, "has ", constraint->source.size(), " bytes; at most ", proto::kMaxGrammar,
                      " are allowed");
    fields.grammar = std::move(constraint->source);
    fields.grammar_param = std::move(constraint->param);
  }
  return fields.grammar.empty() ? absl::OkStatus() : CheckGrammarFields(fields, fields.grammar_param, model);
}

absl::Status CheckGrammarFields(const GenerationFields& fields, const std::string& param, const ServedModel& model) {
  if (model.grammars == nullptr) return BadField(param, "this model has no tokenizer, so no text");
  if (model.end_token_ids.empty()) return BadField(param, "this model has no token that ends a text");
  if (fields.min_tokens > 0) return BadField("min_tokens", "cannot stand together with ", param);
  if (fields.ignore_eos) return BadField("ignore_eos", "cannot stand together with ", param);
  return absl::OkStatus();
}

bool CompilesGrammar(const std::string& grammar, const ServedModel& model) {
  return !grammar.empty() && model.grammars->Find(grammar) == nullptr;
}

absl::Status ChooseGrammar(const std::string& grammar, const std::string& param, const ServedModel& model,
                           const CancelToken* cancel, proto::SamplingParams& sampling) {
  if (grammar.empty()) return absl::OkStatus();
  if (grammar.size() > proto::kMaxGrammar)
    return BadField(param, "has ", grammar.size(), " bytes as a grammar; at most ", proto::kMaxGrammar, " are allowed");
  const auto compiled = model.grammars->Compile(grammar, cancel);
  if (absl::IsCancelled(compiled.status()) || absl::IsUnavailable(compiled.status())) return compiled.status();
  if (!compiled.ok()) return BadField(param, std::string(compiled.status().message()));
  sampling.follows_grammar = true;
  sampling.grammar = {grammar, model.end_token_ids};
  return absl::OkStatus();
}

}  // namespace dovetail::server
