#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "server/openai/gbnf_rules.h"

namespace dovetail::server {

inline constexpr int kMaxGbnfParts = 20'000;  // of a rule, each counted as often as it is repeated at most

// A grammar in GBNF, the notation of llama.cpp, as the compiler gets it (grammar::Kind::kEbnf): rules of literals,
// classes of characters, references, groups and repetitions, of which `root` is the text. The compiler's own notation
// looks alike and has more, such as limits and tokens, which would not be enforced: so the rules are written anew.
// kInvalidArgument names `param`, the line and what is wrong there (gbnf_rules.h; no rule root; a rule that may begin
// with itself, that never ends, or that is too large). About linear in the text.
// Threads: pure.
absl::StatusOr<std::string> EnforceableGbnf(const std::string& text, const std::string& param);

// Likewise of rules that were read, whichever notation they came in; `root` is the index of that of the text.
absl::StatusOr<std::string> EnforceableRules(const std::vector<gbnf::Rule>& rules, int root, const std::string& param);

}  // namespace dovetail::server
