#include "server/openai/field_reader.h"

#include <cmath>
#include <utility>

#include "base/check.h"

namespace dovetail::server {
namespace {

template <typename Rules>
const auto& RuleOf(const Rules& rules, const std::string& name) {
  for (const auto& rule : rules)
    if (rule.name == name) return rule;
  DT_CHECK(false, "no rule for the field ", name);
  return rules[0];
}

// 2 as "2", 0.01 as "0.01".
std::string Shown(double value) { return absl::StrCat(value); }

}  // namespace

std::string Describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::string: {
      const auto& text = value.get_ref<const std::string&>();
      return text.size() <= 40 ? absl::StrCat("the string ", Dump(value))
                               : absl::StrCat("a string of ", text.size(), " bytes");
    }
    case Json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case Json::value_t::array: return "an array";
    case Json::value_t::object: return "an object";
    case Json::value_t::null: return "null";
    default: return Dump(value);
  }
}

absl::StatusOr<int64_t> ToInt(const Json& value, const std::string& path, const IntRule& rule) {
  if (!value.is_number()) return BadField(path, "must be an integer, not ", Describe(value));
  const auto out_of_range = [&] { return BadField(path, Describe(value), " is outside ", rule.min, " .. ", rule.max); };
  int64_t number = 0;
  if (value.is_number_float()) {
    const double real = value.get<double>();
    if (!(std::fabs(real) < 9007199254740992.0)) return out_of_range();
    if (real != std::floor(real)) return BadField(path, "must be an integer, not ", Describe(value));
    number = static_cast<int64_t>(real);
  } else if (value.is_number_unsigned()) {
    if (value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return out_of_range();
    number = static_cast<int64_t>(value.get<uint64_t>());
  } else {
    number = value.get<int64_t>();
  }
  if (number < rule.min || number > rule.max) return out_of_range();
  return number;
}

absl::StatusOr<float> ToFloat(const Json& value, const std::string& path, const FloatRule& rule) {
  if (!value.is_number()) return BadField(path, "must be a number, not ", Describe(value));
  const double real = value.get<double>();
  if (!(real >= rule.min && real <= rule.max))
    return BadField(path, Describe(value), " is outside ", Shown(rule.min), " .. ", Shown(rule.max));
  return static_cast<float>(real);
}

absl::StatusOr<TokenId> ToTokenId(const Json& value, const std::string& path, int vocab_size) {
  DT_ASSIGN_OR_RETURN(const int64_t id, ToInt(value, path, {"token id", 0, vocab_size - 1}));
  return static_cast<TokenId>(id);
}

FieldReader::FieldReader(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

const Json* FieldReader::Find(const std::string& name) const {
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

std::string FieldReader::Path(const std::string& name) const {
  return path_.empty() ? name : absl::StrCat(path_, ".", name);
}

absl::StatusOr<std::optional<int64_t>> FieldReader::Int(const std::string& name) const {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  DT_ASSIGN_OR_RETURN(const int64_t number, ToInt(*value, Path(name), RuleOf(kIntRules, name)));
  return number;
}

absl::StatusOr<std::optional<float>> FieldReader::Float(const std::string& name) const {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  DT_ASSIGN_OR_RETURN(const float number, ToFloat(*value, Path(name), RuleOf(kFloatRules, name)));
  return number;
}

absl::StatusOr<bool> FieldReader::Bool(const std::string& name, bool absent) const {
  const Json* value = Find(name);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) return BadField(Path(name), "must be true or false, not ", Describe(*value));
  return value->get<bool>();
}

absl::StatusOr<std::optional<std::string>> FieldReader::String(const std::string& name, size_t max_bytes) const {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) return BadField(Path(name), "must be a string, not ", Describe(*value));
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > max_bytes) return BadField(Path(name), text.size(), " bytes; at most ", max_bytes, " are allowed");
  return text;
}

absl::StatusOr<std::optional<std::vector<TokenId>>> FieldReader::TokenIds(const std::string& name, size_t max_count,
                                                                          int vocab_size) const {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) return BadField(Path(name), "must be an array of token ids, not ", Describe(*value));
  if (value->size() > max_count)
    return BadField(Path(name), value->size(), " token ids; at most ", max_count, " are allowed");
  std::vector<TokenId> ids;
  ids.reserve(value->size());
  for (const Json& element : *value) {
    DT_ASSIGN_OR_RETURN(const TokenId id, ToTokenId(element, absl::StrCat(Path(name), ".", ids.size()), vocab_size));
    ids.push_back(id);
  }
  return ids;
}

}  // namespace dovetail::server
