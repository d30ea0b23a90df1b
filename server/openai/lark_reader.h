#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "server/openai/gbnf_characters.h"

namespace dovetail::server::lark {

struct Grammar {
  std::vector<gbnf::Rule> rules;  // terminals are rules, too
  int root = 0;                   // the text
};

// A grammar in Lark's notation as rules. Its texts are those that Lark's Earley parser takes with the dynamic_complete
// lexer: a terminal may match any text that its expression matches. What %ignore names may stand before a text and
// behind each terminal. Trees are of no interest, so ?, !, _, aliases and priorities change nothing.
// Taken are rules and terminals, strings, regular expressions (lark_regex.h), ranges, groups, repetitions, %ignore, and
// %import of the terminals of `common`, of which ESCAPED_STRING and C_COMMENT end where they can first.
// Errors: kInvalidArgument names `param`, the line, and what is not taken or wrong: templates, other directives, rules
//         in terminals, terminals in themselves, names that are not defined or twice, no rule start, and the limits of
//         gbnf_rules.h. Linear in the text, which is UTF-8.
// Threads: pure
// Source:  Lark 1.3, docs/grammar.md.
absl::StatusOr<Grammar> ReadGrammar(const std::string& text, const std::string& param, gbnf::Spelling spelling);

// What a terminal of Lark's library `common` is, as a regular expression; null: there is none of this name.
const char* CommonTerminal(std::string_view name);

}  // namespace dovetail::server::lark
