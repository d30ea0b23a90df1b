#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/json.h"

namespace dovetail::server {

inline constexpr int kMaxTagDepth = 24;    // of formats inside one another
inline constexpr int kMaxTagParts = 1000;  // formats and strings, in total

// A structural tag, as vLLM and xgrammar have it: a text made of parts, each with a grammar of its own. `value` is
// {type: structural_tag, format}, the older {structures, triggers}, or either as JSON text. The result is what the
// compiler gets (grammar::Kind::kStructuralTag).
// Taken are the formats const_string, json_schema (style json), regex, grammar (GBNF), any_text with excludes,
// sequence, or, optional, star, plus, repeat, tag, triggered_tags and tags_with_separator; the schemas, expressions and
// grammars inside are those of json_schema.h, regex_check.h and gbnf.h. Errors:  kInvalidArgument names the path below
// `param`: a format or a field that is not known or would not be
//          enforced (tokens, limits in tokens or characters, other styles), and what is malformed. Linear.
// Threads: pure
absl::StatusOr<std::string> EnforceableTag(const Json& value, const std::string& param);

}  // namespace dovetail::server
