#pragma once
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/openai/gbnf_characters.h"

namespace dovetail::server::lark {

inline constexpr int kMaxGroups = 32;  // inside one another

// A regular expression between the slashes of a Lark grammar, as a part of a grammar's rules: what it matches as a
// whole. Taken are alternatives, groups, classes, `.`, \d \w \s and their opposites, and quantifiers, whose laziness
// changes nothing of what they match. \d, \w and \s are of ASCII, and their opposites are printable ASCII characters
// that they leave out. `flags`: i (ASCII letters), m, s and u.
// Errors: kInvalidArgument says what is not taken, and at which byte of the pattern: anchors, look-around,
//         back-references, other flags. Linear in the pattern.
// Threads: pure
absl::StatusOr<gbnf::Part> PartOfRegex(std::string_view pattern, std::string_view flags, gbnf::Spelling spelling);

// A text that may be written in either case where `ignore_case` says so.
gbnf::Part PartOfText(const std::vector<uint32_t>& text, bool ignore_case, gbnf::Spelling spelling);

}  // namespace dovetail::server::lark
