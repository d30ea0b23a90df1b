#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/answers/call_formats.h"
#include "server/openai/json.h"

// Parts of xgrammar's structural tags, as JSON.
// Threads: pure.

namespace dovetail::server::parts {

inline constexpr int kMaxWhitespace = 24;  // in a row, between the parts of a JSON text

inline Json Text(std::string_view text) { return {{"type", "const_string"}, {"value", std::string(text)}}; }
inline Json Sequence(Json::array_t elements) { return {{"type", "sequence"}, {"elements", std::move(elements)}}; }
inline Json OneOf(Json::array_t elements) {
  return elements.size() == 1 ? elements.front() : Json{{"type", "or"}, {"elements", std::move(elements)}};
}
inline Json Optional(Json content) { return {{"type", "optional"}, {"content", std::move(content)}}; }
inline Json Schema(const Json& schema, std::string_view style = "json") {
  return {{"type", "json_schema"},
          {"json_schema", schema},
          {"style", std::string(style)},
          {"max_whitespace_cnt", kMaxWhitespace}};
}
// What a call's arguments are as JSON.
inline Json Arguments(const Tool& tool) {
  if (tool.input_grammar.empty()) return Schema(tool.parameters);
  return Sequence({Text("{\"input\": \""), Json{{"type", "grammar"}, {"grammar", tool.input_grammar}}, Text("\"}")});
}
// `one`, and more of it behind `separator` if `several`.
inline Json List(const Json& one, const Json& separator, bool several) {
  if (!several) return one;
  return Sequence({one, {{"type", "star"}, {"content", Sequence({separator, one})}}});
}

}  // namespace dovetail::server::parts
