#include "server/openai/structural_tag.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "server/openai/answers/grammar_parts.h"
#include "server/openai/api_error.h"
#include "server/openai/field_reader.h"
#include "server/openai/gbnf.h"
#include "server/openai/json_schema.h"
#include "server/openai/regex_check.h"

namespace dovetail::server {
namespace {

constexpr int kMaxRepeat = 1000;

class TagReader {
 public:
  absl::StatusOr<Json> Format(const Json& value, const std::string& path, int depth = 0) {
    if (depth > kMaxTagDepth) return BadField(path, "more than ", kMaxTagDepth, " formats inside one another");
    DT_RETURN_IF_ERROR(Count(path));
    if (!value.is_object()) return BadField(path, "must be an object with type, not ", Describe(value));
    const auto type = value.find("type");
    if (type == value.end() || !type->is_string()) return BadField(path + ".type", "is required: a string");
    const auto& name = type->get_ref<const std::string&>();
    if (name == "const_string") return ConstString(value, path);
    if (name == "json_schema") return Schema(value, path);
    if (name == "regex") return Regex(value, path);
    if (name == "grammar") return Grammar(value, path);
    if (name == "any_text") return AnyText(value, path);
    if (name == "sequence" || name == "or") return Elements(value, path, name, depth);
    if (name == "optional" || name == "star" || name == "plus" || name == "repeat")
      return Repeated(value, path, name, depth);
    if (name == "tag") return Tag(value, path, depth);
    if (name == "triggered_tags") return TriggeredTags(value, path, depth);
    if (name == "tags_with_separator") return TagsWithSeparator(value, path, depth);
    return BadField(path + ".type", Describe(*type),
                    " is not supported; use const_string, json_schema, regex, grammar, any_text, sequence, or, "
                    "optional, star, plus, repeat, tag, triggered_tags or tags_with_separator");
  }

  // {structures: [{begin, schema, end}], triggers}, as it was before there were formats.
  absl::StatusOr<Json> Structures(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "structures", "triggers"}));
    const Json& structures = value["structures"];
    const std::string inner = path + ".structures";
    if (!structures.is_array() || structures.empty()) return BadField(inner, "must be an array of at least one object");
    Json tags = Json::array();
    for (size_t i = 0; i < structures.size(); ++i) {
      const std::string at = absl::StrCat(inner, ".", i);
      if (!structures[i].is_object()) return BadField(at, "must be an object with begin, schema and end");
      DT_RETURN_IF_ERROR(Count(at));
      DT_RETURN_IF_ERROR(OnlyFields(structures[i], at, {"begin", "schema", "end"}));
      Json tag = {{"type", "tag"}};
      DT_ASSIGN_OR_RETURN(tag["begin"], Text(structures[i], "begin", at, /*may_be_empty=*/false));
      DT_ASSIGN_OR_RETURN(tag["end"], Text(structures[i], "end", at, /*may_be_empty=*/false));
      if (!structures[i].contains("schema")) return BadField(at + ".schema", "is required");
      DT_ASSIGN_OR_RETURN(const Json schema, EnforceableSchema(structures[i]["schema"], at + ".schema"));
      tag["content"] = parts::Schema(schema);
      tags.push_back(std::move(tag));
    }
    Json format = {{"type", "triggered_tags"}, {"tags", std::move(tags)}};
    DT_ASSIGN_OR_RETURN(format["triggers"], Texts(value, "triggers", path, /*required=*/true));
    DT_RETURN_IF_ERROR(CheckTriggers(format, path));
    return format;
  }

 private:
  absl::Status Count(const std::string& path) {
    if (++parts_ <= kMaxTagParts) return absl::OkStatus();
    return BadField(path, "more than ", kMaxTagParts, " formats and strings");
  }

  static absl::Status OnlyFields(const Json& value, const std::string& path,
                                 std::initializer_list<std::string_view> known) {
    for (const auto& [name, field] : value.items()) {
      const bool is_known = std::find(known.begin(), known.end(), name) != known.end();
      if (!is_known && !field.is_null()) return BadField(absl::StrCat(path, ".", name), "is not supported here");
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<bool> Flag(const Json& value, const char* name, const std::string& path) {
    const auto at = value.find(name);
    if (at == value.end() || at->is_null()) return false;
    if (!at->is_boolean()) return BadField(absl::StrCat(path, ".", name), "must be true or false");
    return at->get<bool>();
  }

  static absl::StatusOr<Json> CheckedText(const Json& text, const std::string& path, bool may_be_empty) {
    if (!text.is_string()) return BadField(path, "must be a string, not ", Describe(text));
    const auto& bytes = text.get_ref<const std::string&>();
    if (bytes.empty() && !may_be_empty) return BadField(path, "is empty");
    if (bytes.find('\0') != std::string::npos) return BadField(path, "no text has the character U+0000");
    return text;
  }
  static absl::StatusOr<Json> Text(const Json& value, const char* name, const std::string& path, bool may_be_empty) {
    const auto at = value.find(name);
    const std::string inner = absl::StrCat(path, ".", name);
    if (at == value.end()) return BadField(inner, "is required: a string");
    return CheckedText(*at, inner, may_be_empty);
  }
  absl::StatusOr<Json> Texts(const Json& value, const char* name, const std::string& path, bool required) {
    const auto at = value.find(name);
    const std::string inner = absl::StrCat(path, ".", name);
    const bool absent = at == value.end() || at->is_null();
    if (absent && !required) return Json::array();
    if (absent || !at->is_array() || (required && at->empty()))
      return BadField(inner, "must be an array of at least one string");
    for (size_t i = 0; i < at->size(); ++i) {
      DT_RETURN_IF_ERROR(Count(inner));
      DT_RETURN_IF_ERROR(CheckedText((*at)[i], absl::StrCat(inner, ".", i), /*may_be_empty=*/false).status());
    }
    return *at;
  }

  static absl::StatusOr<Json> ConstString(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "value"}));
    DT_ASSIGN_OR_RETURN(const Json text, Text(value, "value", path, /*may_be_empty=*/true));
    return parts::Text(text.get<std::string>());
  }

  static absl::StatusOr<Json> Schema(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "json_schema", "style"}));
    if (value.contains("style") && value["style"] != "json")
      return BadField(path + ".style", "must be \"json\", not ", Describe(value["style"]));
    if (!value.contains("json_schema")) return BadField(path + ".json_schema", "is required: a JSON schema");
    DT_ASSIGN_OR_RETURN(const Json schema, EnforceableSchema(value["json_schema"], path + ".json_schema"));
    return parts::Schema(schema);
  }

  static absl::StatusOr<Json> Regex(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "pattern"}));
    DT_ASSIGN_OR_RETURN(const Json pattern, Text(value, "pattern", path, /*may_be_empty=*/false));
    DT_ASSIGN_OR_RETURN(const std::string regex,
                        EnforceableRegex(pattern.get<std::string>(), RegexUse::kWholeText, path + ".pattern"));
    return Json{{"type", "regex"}, {"pattern", regex}};
  }

  static absl::StatusOr<Json> Grammar(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "grammar"}));
    DT_ASSIGN_OR_RETURN(const Json text, Text(value, "grammar", path, /*may_be_empty=*/false));
    DT_ASSIGN_OR_RETURN(const std::string rules, EnforceableGbnf(text.get<std::string>(), path + ".grammar"));
    return Json{{"type", "grammar"}, {"grammar", rules}};
  }

  absl::StatusOr<Json> AnyText(const Json& value, const std::string& path) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "excludes"}));
    Json format = {{"type", "any_text"}};
    DT_ASSIGN_OR_RETURN(format["excludes"], Texts(value, "excludes", path, /*required=*/false));
    return format;
  }

  absl::StatusOr<Json> Elements(const Json& value, const std::string& path, const std::string& type, int depth) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "elements"}));
    const std::string inner = path + ".elements";
    const auto at = value.find("elements");
    if (at == value.end() || !at->is_array() || at->empty())
      return BadField(inner, "must be an array of at least one format");
    Json format = {{"type", type}, {"elements", Json::array()}};
    for (size_t i = 0; i < at->size(); ++i) {
      DT_ASSIGN_OR_RETURN(Json one, Format((*at)[i], absl::StrCat(inner, ".", i), depth + 1));
      format["elements"].push_back(std::move(one));
    }
    return format;
  }

  absl::StatusOr<Json> Repeated(const Json& value, const std::string& path, const std::string& type, int depth) {
    const bool counted = type == "repeat";
    DT_RETURN_IF_ERROR(counted ? OnlyFields(value, path, {"type", "content", "min", "max"})
                               : OnlyFields(value, path, {"type", "content"}));
    if (!value.contains("content")) return BadField(path + ".content", "is required: a format");
    Json format = {{"type", type}};
    DT_ASSIGN_OR_RETURN(format["content"], Format(value["content"], path + ".content", depth + 1));
    if (!counted) return format;
    for (const char* name : {"min", "max"}) {
      const std::string inner = absl::StrCat(path, ".", name);
      const auto at = value.find(name);
      if (at == value.end() || !at->is_number_integer() || *at < 0 || *at > kMaxRepeat)
        return BadField(inner, "must be a number from 0 to ", kMaxRepeat);
      format[name] = *at;
    }
    if (format["max"] < format["min"] || format["max"] == 0)
      return BadField(path + ".max", "must be at least min, and 1");
    return format;
  }

  absl::StatusOr<Json> Tag(const Json& value, const std::string& path, int depth) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "begin", "content", "end"}));
    Json format = {{"type", "tag"}};
    DT_ASSIGN_OR_RETURN(format["begin"], Text(value, "begin", path, /*may_be_empty=*/false));
    if (!value.contains("content")) return BadField(path + ".content", "is required: a format");
    DT_ASSIGN_OR_RETURN(format["content"], Format(value["content"], path + ".content", depth + 1));
    const auto end = value.find("end");
    if (end != value.end() && end->is_array()) {
      DT_ASSIGN_OR_RETURN(format["end"], Texts(value, "end", path, /*required=*/true));
    } else {
      DT_ASSIGN_OR_RETURN(format["end"], Text(value, "end", path, /*may_be_empty=*/false));
    }
    return format;
  }

  absl::StatusOr<Json> Tags(const Json& value, const std::string& path, int depth) {
    const std::string inner = path + ".tags";
    const auto at = value.find("tags");
    if (at == value.end() || !at->is_array() || at->empty())
      return BadField(inner, "must be an array of at least one tag");
    Json tags = Json::array();
    for (size_t i = 0; i < at->size(); ++i) {
      const std::string one = absl::StrCat(inner, ".", i);
      const Json& tag = (*at)[i];
      if (!tag.is_object() || (tag.contains("type") && tag["type"] != "tag"))
        return BadField(one, "must be a tag: an object with begin, content and end");
      DT_RETURN_IF_ERROR(Count(one));
      DT_ASSIGN_OR_RETURN(Json made, Tag(tag, one, depth + 1));
      tags.push_back(std::move(made));
    }
    return tags;
  }

  // Every tag begins with a trigger; a tag that does not could never begin.
  static absl::Status CheckTriggers(const Json& format, const std::string& path) {
    const Json& tags = format["tags"];
    for (size_t i = 0; i < tags.size(); ++i) {
      const auto& begin = tags[i]["begin"].get_ref<const std::string&>();
      const auto starts = [&begin](const Json& trigger) {
        return begin.starts_with(trigger.get_ref<const std::string&>());
      };
      if (std::none_of(format["triggers"].begin(), format["triggers"].end(), starts))
        return BadField(path + ".triggers", "none of them begins the text ", Describe(tags[i]["begin"]));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Json> TriggeredTags(const Json& value, const std::string& path, int depth) {
    DT_RETURN_IF_ERROR(
        OnlyFields(value, path, {"type", "triggers", "tags", "excludes", "at_least_one", "stop_after_first"}));
    Json format = {{"type", "triggered_tags"}};
    DT_ASSIGN_OR_RETURN(format["triggers"], Texts(value, "triggers", path, /*required=*/true));
    DT_ASSIGN_OR_RETURN(format["excludes"], Texts(value, "excludes", path, /*required=*/false));
    DT_ASSIGN_OR_RETURN(format["tags"], Tags(value, path, depth));
    DT_ASSIGN_OR_RETURN(format["at_least_one"], Flag(value, "at_least_one", path));
    DT_ASSIGN_OR_RETURN(format["stop_after_first"], Flag(value, "stop_after_first", path));
    DT_RETURN_IF_ERROR(CheckTriggers(format, path));
    return format;
  }

  absl::StatusOr<Json> TagsWithSeparator(const Json& value, const std::string& path, int depth) {
    DT_RETURN_IF_ERROR(OnlyFields(value, path, {"type", "tags", "separator", "at_least_one", "stop_after_first"}));
    Json format = {{"type", "tags_with_separator"}};
    DT_ASSIGN_OR_RETURN(format["separator"], Text(value, "separator", path, /*may_be_empty=*/true));
    DT_ASSIGN_OR_RETURN(format["tags"], Tags(value, path, depth));
    DT_ASSIGN_OR_RETURN(format["at_least_one"], Flag(value, "at_least_one", path));
    DT_ASSIGN_OR_RETURN(format["stop_after_first"], Flag(value, "stop_after_first", path));
    return format;
  }

  int parts_ = 0;
};

}  // namespace

absl::StatusOr<std::string> EnforceableTag(const Json& value, const std::string& param) {
  if (value.is_string()) {
    const auto parsed = ParseJson(value.get_ref<const std::string&>());
    if (!parsed.ok()) return BadField(param, std::string(parsed.status().message()));
    if (parsed->is_string()) return BadField(param, "must be an object as JSON text");
    return EnforceableTag(*parsed, param);
  }
  if (!value.is_object()) return BadField(param, "must be an object, not ", Describe(value));
  if (value.contains("type") && value["type"] != "structural_tag")
    return BadField(param + ".type", "must be \"structural_tag\"");
  TagReader reader;
  Json format;
  if (value.contains("structures")) {
    DT_ASSIGN_OR_RETURN(format, reader.Structures(value, param));
  } else if (value.contains("format")) {
    for (const auto& [name, field] : value.items())
      if (name != "type" && name != "format" && !field.is_null())
        return BadField(absl::StrCat(param, ".", name), "is not supported here");
    DT_ASSIGN_OR_RETURN(format, reader.Format(value["format"], param + ".format"));
  } else {
    return BadField(param + ".format", "is required: a format");
  }
  return Dump(Json{{"type", "structural_tag"}, {"format", std::move(format)}});
}

}  // namespace dovetail::server
