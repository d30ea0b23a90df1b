#include "server/openai/schema_overlap.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace dovetail::server {
namespace {

constexpr int kMostDepth = 16;  // of references and alternatives that are followed

// Integers are numbers, also where a schema says number.
std::string KindOf(const Json& value) {
  if (value.is_number()) return "number";
  if (value.is_string()) return "string";
  return value.is_boolean() ? "boolean" : "null";
}

std::string KindOfType(const Json& schema) {
  const std::string type = schema.at("type");
  return type == "integer" ? "number" : type;
}

bool IsAbove(const Json& a, const char* low, const Json& b, const char* high) {
  return a.contains(low) && b.contains(high) && a.at(low) > b.at(high);
}

// Ranges that do not meet: of values, lengths or counts.
bool RangesExclude(const Json& a, const Json& b) {
  constexpr std::pair<const char*, const char*> kRanges[] = {
      {"minimum", "maximum"}, {"minLength", "maxLength"}, {"minItems", "maxItems"}};
  return std::any_of(std::begin(kRanges), std::end(kRanges), [&](const auto& range) {
    return IsAbove(a, range.first, b, range.second) || IsAbove(b, range.first, a, range.second);
  });
}

bool IsOutside(const Json& value, const Json& schema) {
  if (KindOf(value) != KindOfType(schema)) return true;
  if (!value.is_number()) return false;
  return (schema.contains("minimum") && value < schema.at("minimum")) ||
         (schema.contains("maximum") && value > schema.at("maximum"));
}

bool Has(const Json& list, const Json& value) { return std::find(list.begin(), list.end(), value) != list.end(); }

}  // namespace

// What a's grammar writes has no other properties than a's, and all that a requires.
bool SchemaOverlap::ObjectsExclude(const Json& a, const Json& b, int depth) const {
  if (!a.contains("properties") || !b.contains("properties")) return false;
  const Json& ours = a.at("properties");
  const Json& theirs = b.at("properties");
  const auto is_lacking = [&](const Json& name) { return !ours.contains(name.get<std::string>()); };
  if (std::any_of(b.at("required").begin(), b.at("required").end(), is_lacking)) return true;
  return std::any_of(a.at("required").begin(), a.at("required").end(), [&](const Json& name) {
    const auto& key = name.get_ref<const std::string&>();
    return theirs.contains(key) && Excludes(ours.at(key), theirs.at(key), depth + 1);
  });
}

bool SchemaOverlap::Excludes(const Json& a, const Json& b, int depth) const {
  if (depth > kMostDepth) return false;
  const auto all_of = [](const Json& list, const auto& holds) { return std::all_of(list.begin(), list.end(), holds); };
  for (const Json* one : {&a, &b}) {
    const bool first = one == &a;
    const auto against = [&](const Json& part) {
      return first ? Excludes(part, b, depth + 1) : Excludes(a, part, depth + 1);
    };
    if (one->contains("$ref")) {
      const Json* const target = resolve_(one->at("$ref").get<std::string>());
      return target != nullptr && against(*target);
    }
    if (one->contains("anyOf")) return all_of(one->at("anyOf"), against);
  }
  if (a.contains("enum") && b.contains("enum"))
    return all_of(a.at("enum"), [&](const Json& value) { return !Has(b.at("enum"), value); });
  if (a.empty() || b.empty()) return false;
  if (a.contains("enum")) return all_of(a.at("enum"), [&](const Json& value) { return IsOutside(value, b); });
  if (b.contains("enum")) return all_of(b.at("enum"), [&](const Json& value) { return IsOutside(value, a); });
  if (KindOfType(a) != KindOfType(b)) return true;
  return a.at("type") == "object" ? ObjectsExclude(a, b, depth) : RangesExclude(a, b);
}

}  // namespace dovetail::server
