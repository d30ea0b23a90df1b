#include "server/openai/json_schema.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "absl/strings/str_join.h"
#include "server/openai/api_error.h"
#include "server/openai/field_reader.h"
#include "server/openai/regex_check.h"
#include "server/openai/schema_merge.h"
#include "server/openai/schema_overlap.h"
#include "server/openai/string_formats.h"

namespace dovetail::server {
namespace {

constexpr int64_t kMaxNumber = int64_t{1} << 53;  // what every JSON reader keeps exactly

const std::set<std::string> kAnnotations = {"title",    "description", "default",  "examples", "$schema",
                                            "$comment", "deprecated",  "readOnly", "writeOnly"};
const std::map<std::string, std::set<std::string>> kKeywordsOf = {
    {"object", {"properties", "required", "additionalProperties"}},
    {"array", {"items", "minItems", "maxItems", "uniqueItems"}},
    {"string", {"minLength", "maxLength", "pattern", "format"}},
    {"integer", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}},
    {"number", {}},
    {"boolean", {}},
    {"null", {}}};

std::string At(const std::string& path, const std::string& key) { return absl::StrCat(path, ".", key); }

class SchemaChecker {
 public:
  explicit SchemaChecker(std::string param) : param_(std::move(param)) {}

  absl::StatusOr<Json> Check(const Json& root) {
    root_ = &root;
    if (root.is_object()) DT_RETURN_IF_ERROR(FindDefinitions(root));
    DT_ASSIGN_OR_RETURN(Json out, Walk(root, param_, 0));
    if (!definitions_name_.empty()) {
      Json definitions = Json::object();
      for (const auto& [name, schema] : root.at(definitions_name_).items()) {
        DT_ASSIGN_OR_RETURN(definitions[name], Walk(schema, At(At(param_, definitions_name_), name), 1));
      }
      out[definitions_name_] = std::move(definitions);
    }
    DT_RETURN_IF_ERROR(RefuseEndless(out));
    DT_RETURN_IF_ERROR(RefuseOverlaps(out));
    return out;
  }

 private:
  absl::Status FindDefinitions(const Json& root) {
    for (const char* name : {"$defs", "definitions"}) {
      const auto found = root.find(name);
      if (found == root.end()) continue;
      if (!definitions_name_.empty()) return BadField(At(param_, name), "cannot stand together with $defs");
      if (!found->is_object()) return BadField(At(param_, name), "must be an object, not ", Describe(*found));
      definitions_name_ = name;
    }
    return absl::OkStatus();
  }

  absl::Status Count(const std::string& path) {
    if (++parts_ <= kMaxSchemaParts) return absl::OkStatus();
    return BadField(path, "the schema has more than ", kMaxSchemaParts, " parts (schemas, properties, enum values)");
  }

  absl::StatusOr<Json> Walk(const Json& schema, const std::string& path, int depth) {
    DT_RETURN_IF_ERROR(Count(path));
    if (depth > kMaxSchemaDepth) return BadField(path, "is more than ", kMaxSchemaDepth, " schemas deep");
    if (schema.is_boolean()) {
      if (schema.get<bool>()) return Json::object();
      return BadField(path, "false allows no value");
    }
    if (!schema.is_object()) return BadField(path, "must be a schema (an object), not ", Describe(schema));
    if (schema.contains("allOf")) return AllOf(schema, path, depth);
    for (const char* form : {"$ref", "anyOf", "oneOf", "enum", "const"})
      if (schema.contains(form)) return Form(form, schema, path, depth);
    return Typed(schema, path, depth);
  }

  bool IsNote(const std::string& key, const Json& schema) const {
    return kAnnotations.contains(key) || (&schema == root_ && key == definitions_name_);
  }

  // `form` decides alone what the value may be.
  absl::StatusOr<Json> Form(const std::string& form, const Json& schema, const std::string& path, int depth) {
    const bool values = form == "enum" || form == "const";
    for (const auto& [key, value] : schema.items())
      if (key != form && !IsNote(key, schema) && !(values && key == "type")) {
        if (form != "oneOf") return BadField(At(path, key), "is not enforced together with ", form);
        if (key != "discriminator")  // which repeats what the alternatives say
          return BadField(At(path, form), "is not enforced together with ", key);
      }
    if (form == "$ref") return Reference(schema.at(form), At(path, form));
    if (form == "anyOf") return AnyOf(schema.at(form), At(path, form), depth);
    if (form == "oneOf") {
      DT_ASSIGN_OR_RETURN(Json any, AnyOf(schema.at(form), At(path, form), depth));
      one_of_.emplace_back(At(path, form), any.at("anyOf"));
      return any;
    }
    Json list = form == "enum" ? schema.at(form) : Json::array({schema.at(form)});
    if (!list.is_array() || list.empty()) return BadField(At(path, form), "must be an array of at least one value");
    for (const Json& value : list) DT_RETURN_IF_ERROR(Value(value, schema, At(path, form)));
    return Json{{"enum", std::move(list)}};
  }

  absl::StatusOr<Json> Reference(const Json& target, const std::string& path) {
    if (!target.is_string()) return BadField(path, "must be a string, not ", Describe(target));
    const auto& text = target.get_ref<const std::string&>();
    const std::string prefix = absl::StrCat("#/", definitions_name_, "/");
    const bool known = text == "#" || (!definitions_name_.empty() && text.rfind(prefix, 0) == 0 &&
                                       root_->at(definitions_name_).contains(text.substr(prefix.size())));
    if (!known || text.find_first_of("~%") != std::string::npos)
      return BadField(path, Describe(target), " is not \"#\" or a schema in this schema's $defs");
    return Json{{"$ref", target}};
  }

  absl::StatusOr<Json> AnyOf(const Json& list, const std::string& path, int depth) {
    if (!list.is_array() || list.empty()) return BadField(path, "must be an array of at least one schema");
    Json out = Json::array();
    for (const Json& one : list) {
      DT_ASSIGN_OR_RETURN(Json checked, Walk(one, At(path, std::to_string(out.size())), depth + 1));
      out.push_back(std::move(checked));
    }
    return Json{{"anyOf", std::move(out)}};
  }

  // What a schema without a form of its own says, behind its references to definitions. Null: a reference to itself.
  const Json* Resolved(const Json* schema) const {
    for (int followed = 0; schema->is_object() && schema->contains("$ref"); ++followed) {
      const std::string target = schema->at("$ref");
      if (target == "#" || followed > kMaxSchemaDepth) return nullptr;
      schema = &root_->at(definitions_name_).at(target.substr(target.rfind('/') + 1));
    }
    return schema;
  }

  // Each schema is checked where it stands, and then all of them as one.
  absl::StatusOr<Json> AllOf(const Json& schema, const std::string& path, int depth) {
    const Json& list = schema.at("allOf");
    if (!list.is_array() || list.empty()) return BadField(At(path, "allOf"), "must be an array of at least one schema");
    Json own = schema;
    for (const auto& [key, value] : schema.items())
      if (key == "allOf" || IsNote(key, schema)) own.erase(key);
    std::vector<SchemaPart> parts;
    if (!own.empty()) {
      DT_RETURN_IF_ERROR(Walk(own, path, depth + 1).status());
      parts.push_back({Resolved(&own), path});
    }
    Json only;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string at = At(At(path, "allOf"), std::to_string(i));
      DT_ASSIGN_OR_RETURN(only, Walk(list[i], at, depth + 1));
      parts.push_back({Resolved(&list[i]), at});
    }
    if (parts.size() == 1) return only;
    for (const SchemaPart& part : parts)
      if (part.schema == nullptr || !part.schema->is_object() || part.schema->contains("allOf"))
        return BadField(part.path, "several schemas of allOf are enforced for plain objects only");
    DT_ASSIGN_OR_RETURN(const Json merged, MergeObjects(parts));
    return Typed(merged, path, depth);
  }

  static bool IsOfType(const Json& value, const std::string& type) {
    if (type == "string") return value.is_string();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    return type == "boolean" ? value.is_boolean() : type == "null" && value.is_null();
  }

  absl::Status Value(const Json& value, const Json& schema, const std::string& path) {
    DT_RETURN_IF_ERROR(Count(path));
    if (!value.is_string() && !value.is_boolean() && !value.is_null() && !value.is_number_integer())
      return BadField(path, Describe(value), ": only strings, integers, booleans and null are enforced here");
    if (value.is_number_integer() && (value > kMaxNumber || value < -kMaxNumber))
      return BadField(path, Describe(value), " is beyond 2^53");
    if (!schema.contains("type")) return absl::OkStatus();
    DT_ASSIGN_OR_RETURN(const auto types, Types(schema, path));
    for (const std::string& type : types)
      if (IsOfType(value, type)) return absl::OkStatus();
    return BadField(path, Describe(value), " is not of the schema's type");
  }

  // Without `type`, the keywords say which.
  absl::StatusOr<std::vector<std::string>> Types(const Json& schema, const std::string& path) {
    std::vector<std::string> types;
    const auto given = schema.find("type");
    if (given == schema.end()) {
      for (const auto& [type, keywords] : kKeywordsOf)
        if (std::any_of(keywords.begin(), keywords.end(), [&](const auto& key) { return schema.contains(key); }))
          types.push_back(type);
      if (types.size() > 1) return BadField(path, "has keywords of the types ", types[0], " and ", types[1]);
      return types;
    }
    const Json list = given->is_array() ? *given : Json::array({*given});
    for (const Json& one : list) {
      if (!one.is_string() || !kKeywordsOf.contains(one.get<std::string>()))
        return BadField(At(path, "type"), Describe(one), " is no JSON type");
      types.push_back(one.get<std::string>());
    }
    if (types.empty()) return BadField(At(path, "type"), "is empty");
    return types;
  }

  absl::StatusOr<Json> Typed(const Json& schema, const std::string& path, int depth) {
    DT_ASSIGN_OR_RETURN(const auto types, Types(schema, path));
    for (const auto& [key, value] : schema.items()) {
      const bool enforced = std::any_of(types.begin(), types.end(),
                                        [&](const std::string& type) { return kKeywordsOf.at(type).contains(key); });
      if (key != "type" && !enforced && !IsNote(key, schema))
        return BadField(At(path, key), "is not enforced here; leave it out");
    }
    if (types.empty()) return Json::object();
    Json any = Json::array();
    for (const std::string& type : types) {
      DT_ASSIGN_OR_RETURN(Json one, OfType(type, schema, path, depth));
      any.push_back(std::move(one));
    }
    return any.size() == 1 ? any[0] : Json{{"anyOf", std::move(any)}};
  }

  absl::StatusOr<Json> OfType(const std::string& type, const Json& schema, const std::string& path, int depth) {
    if (type == "object") return Object(schema, path, depth);
    if (type == "array") return Array(schema, path, depth);
    if (type == "string") return String(schema, path);
    if (type == "integer") return Integer(schema, path);
    return Json{{"type", type}};
  }

  absl::StatusOr<Json> Object(const Json& schema, const std::string& path, int depth) {
    Json out = {{"type", "object"}};
    const Json none = Json::object();
    const Json& properties = schema.contains("properties") ? schema.at("properties") : none;
    if (!properties.is_object()) return BadField(At(path, "properties"), "must be an object");
    DT_RETURN_IF_ERROR(Required(schema, properties, path));
    if (!properties.empty()) {
      if (schema.contains("additionalProperties") && schema.at("additionalProperties") != false)
        return BadField(At(path, "additionalProperties"), "is not enforced together with properties; use false");
      Json checked = Json::object();
      for (const auto& [name, one] : properties.items()) {
        DT_ASSIGN_OR_RETURN(checked[name], Walk(one, At(At(path, "properties"), name), depth + 1));
      }
      out["properties"] = std::move(checked);
      out["required"] = schema.contains("required") ? schema.at("required") : Json::array();
      out["additionalProperties"] = false;
      return out;
    }
    out["additionalProperties"] = true;
    if (!schema.contains("additionalProperties")) return out;
    const Json& others = schema.at("additionalProperties");
    if (others == false) {
      out["additionalProperties"] = false;
    } else {
      DT_ASSIGN_OR_RETURN(out["additionalProperties"], Walk(others, At(path, "additionalProperties"), depth + 1));
    }
    return out;
  }

  static absl::Status Required(const Json& schema, const Json& properties, const std::string& path) {
    if (!schema.contains("required")) return absl::OkStatus();
    const Json& required = schema.at("required");
    if (!required.is_array()) return BadField(At(path, "required"), "must be an array of names");
    for (const Json& name : required) {
      if (!name.is_string()) return BadField(At(path, "required"), "must be an array of names");
      if (!properties.contains(name.get<std::string>()))
        return BadField(At(path, "required"), Describe(name), " is not in properties, so it is not enforced");
    }
    return absl::OkStatus();
  }

  // Copies a whole number within [low, high], if it is there.
  static absl::Status CopyInt(const Json& schema, const char* key, int64_t low, int64_t high, const std::string& path,
                              Json& out) {
    if (!schema.contains(key)) return absl::OkStatus();
    const Json& value = schema.at(key);
    if (!value.is_number_integer()) return BadField(At(path, key), "must be a whole number, not ", Describe(value));
    if (value < low || value > high) return BadField(At(path, key), Describe(value), " is outside ", low, "..", high);
    out[key] = value;
    return absl::OkStatus();
  }

  static absl::Status InOrder(const Json& out, const char* low, const char* high, const std::string& path) {
    if (out.contains(low) && out.contains(high) && out.at(low) > out.at(high))
      return BadField(At(path, low), "is above ", high, ": no value is left");
    return absl::OkStatus();
  }

  absl::StatusOr<Json> Array(const Json& schema, const std::string& path, int depth) {
    Json out = {{"type", "array"}};
    if (schema.contains("uniqueItems") && schema.at("uniqueItems") != false)
      return BadField(At(path, "uniqueItems"), "is not enforced; leave it out");
    DT_RETURN_IF_ERROR(CopyInt(schema, "minItems", 0, kMaxSchemaItems, path, out));
    DT_RETURN_IF_ERROR(CopyInt(schema, "maxItems", 0, kMaxSchemaItems, path, out));
    DT_RETURN_IF_ERROR(InOrder(out, "minItems", "maxItems", path));
    if (!schema.contains("items")) {
      out["items"] = Json::object();  // said, since xgrammar may take what is not said for none
      return out;
    }
    DT_ASSIGN_OR_RETURN(out["items"], Walk(schema.at("items"), At(path, "items"), depth + 1));
    return out;
  }

  absl::StatusOr<Json> String(const Json& schema, const std::string& path) {
    Json out = {{"type", "string"}};
    DT_RETURN_IF_ERROR(CopyInt(schema, "minLength", 0, kMaxSchemaChars, path, out));
    DT_RETURN_IF_ERROR(CopyInt(schema, "maxLength", 0, kMaxSchemaChars, path, out));
    DT_RETURN_IF_ERROR(InOrder(out, "minLength", "maxLength", path));
    if (schema.contains("format")) return Format(schema, path, out);
    if (!schema.contains("pattern")) return out;
    const Json& pattern = schema.at("pattern");
    if (out.size() > 1) return BadField(At(path, "pattern"), "is not enforced together with minLength or maxLength");
    if (!pattern.is_string()) return BadField(At(path, "pattern"), "must be a string, not ", Describe(pattern));
    DT_ASSIGN_OR_RETURN(out["pattern"],
                        EnforceableRegex(pattern.get<std::string>(), RegexUse::kInJson, At(path, "pattern")));
    return out;
  }

  static absl::StatusOr<Json> Format(const Json& schema, const std::string& path, Json out) {
    const Json& format = schema.at("format");
    const std::string at = At(path, "format");
    if (!format.is_string()) return BadField(at, "must be a string, not ", Describe(format));
    if (out.size() > 1 || schema.contains("pattern"))
      return BadField(at, "is not enforced together with pattern, minLength or maxLength");
    const std::string regex = RegexOfFormat(format.get_ref<const std::string&>());
    if (regex.empty())
      return BadField(at, Describe(format), " is not enforced here; leave it out. Enforced are ",
                      absl::StrJoin(EnforcedFormats(), ", "));
    DT_ASSIGN_OR_RETURN(out["pattern"], EnforceableRegex(regex, RegexUse::kInJson, at));
    return out;
  }

  absl::StatusOr<Json> Integer(const Json& schema, const std::string& path) {
    Json out = {{"type", "integer"}};
    for (const char* key : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
      DT_RETURN_IF_ERROR(CopyInt(schema, key, -kMaxNumber, kMaxNumber, path, out));
    int64_t low = -2 * kMaxNumber, high = 2 * kMaxNumber;
    if (out.contains("minimum")) low = std::max(low, out["minimum"].get<int64_t>());
    if (out.contains("exclusiveMinimum")) low = std::max(low, out["exclusiveMinimum"].get<int64_t>() + 1);
    if (out.contains("maximum")) high = std::min(high, out["maximum"].get<int64_t>());
    if (out.contains("exclusiveMaximum")) high = std::min(high, out["exclusiveMaximum"].get<int64_t>() - 1);
    if (low > high) return BadField(path, "its bounds leave no integer");
    Json plain = {{"type", "integer"}};
    if (low >= -kMaxNumber) plain["minimum"] = low;
    if (high <= kMaxNumber) plain["maximum"] = high;
    return plain;
  }

  // Below, `out` is checked already. A schema has an end if some value of it is finite.
  bool Ends(const Json& schema, const std::set<std::string>& ending) const {
    const auto ends = [&](const Json& one) { return Ends(one, ending); };
    if (schema.contains("$ref")) return ending.contains(schema.at("$ref").get<std::string>());
    if (schema.contains("anyOf")) return std::any_of(schema.at("anyOf").begin(), schema.at("anyOf").end(), ends);
    if (schema.contains("properties"))
      return std::all_of(schema.at("required").begin(), schema.at("required").end(),
                         [&](const Json& name) { return ends(schema.at("properties").at(name.get<std::string>())); });
    if (schema.contains("minItems") && schema.at("minItems") > 0 && schema.contains("items"))
      return ends(schema.at("items"));
    return true;
  }

  // What a schema may be without anything of its own: references to itself there would never be decided.
  void Bare(const Json& schema, std::vector<std::string>& out) const {
    if (schema.contains("$ref")) out.push_back(schema.at("$ref").get<std::string>());
    if (schema.contains("anyOf"))
      for (const Json& one : schema.at("anyOf")) Bare(one, out);
  }

  absl::Status RefuseEndless(const Json& out) {
    std::map<std::string, const Json*> named = {{"#", &out}};
    if (!definitions_name_.empty())
      for (const auto& [name, schema] : out.at(definitions_name_).items())
        named[absl::StrCat("#/", definitions_name_, "/", name)] = &schema;
    std::set<std::string> ending;
    for (bool grew = true; grew;) {
      grew = false;
      for (const auto& [name, schema] : named)
        if (!ending.contains(name) && Ends(*schema, ending)) grew = ending.insert(name).second;
    }
    for (const auto& [name, schema] : named) {
      if (!ending.contains(name))
        return BadField(param_, name, ": refers to itself without an end; no value is finite");
      std::set<std::string> seen;
      std::vector<std::string> next;
      for (Bare(*schema, next); !next.empty();) {
        const std::string one = next.back();
        next.pop_back();
        if (one == name) return BadField(param_, name, ": may be itself, with nothing between; take that out");
        if (seen.insert(one).second) Bare(*named.at(one), next);
      }
    }
    return absl::OkStatus();
  }

  // Of oneOf one alternative alone may hold: they are enforced as those of anyOf where that is sure.
  absl::Status RefuseOverlaps(const Json& out) const {
    const SchemaOverlap overlap([&](const std::string& reference) -> const Json* {
      if (reference == "#") return &out;
      return &out.at(definitions_name_).at(reference.substr(reference.rfind('/') + 1));
    });
    for (const auto& [path, list] : one_of_) {
      for (size_t a = 0; a < list.size(); ++a)
        for (size_t b = 0; b < list.size(); ++b)
          if (a != b && !overlap.Excludes(list[a], list[b]))
            return BadField(path, "a value of alternative ", a, " may be one of alternative ", b,
                            " as well, so it is not enforced; use anyOf, or a required property with another const in "
                            "each");
    }
    return absl::OkStatus();
  }

  const std::string param_;
  std::vector<std::pair<std::string, Json>> one_of_;  // checked alternatives, and where
  const Json* root_ = nullptr;
  std::string definitions_name_;  // "$defs", "definitions" or empty
  int parts_ = 0;
};

}  // namespace

absl::StatusOr<Json> EnforceableSchema(const Json& schema, const std::string& param) {
  return SchemaChecker(param).Check(schema);
}

}  // namespace dovetail::server
