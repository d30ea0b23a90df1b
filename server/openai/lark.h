#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/gbnf_characters.h"

namespace dovetail::server {

// A grammar in Lark's notation (lark_reader.h) as the compiler gets it (grammar::Kind::kEbnf), of texts of their own or
// inside of a JSON string. Rules that begin with themselves are written as repetitions.
// Errors:  kInvalidArgument names `param`, the line and what is wrong there, as lark_reader.h and gbnf.h say; left
//          recursion by way of another rule, or behind what may be empty, is one of these. About linear in the text.
// Threads: pure
absl::StatusOr<std::string> EnforceableLark(const std::string& text, const std::string& param, gbnf::Spelling spelling);

// Likewise a regular expression (lark_regex.h) that a text matches as a whole; ^ at its beginning and $ at its end say
// the same.
absl::StatusOr<std::string> EnforceableLarkRegex(const std::string& pattern, const std::string& param,
                                                 gbnf::Spelling spelling);

}  // namespace dovetail::server
