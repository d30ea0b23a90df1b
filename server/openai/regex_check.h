#pragma once
#include <string>

#include "base/status.h"

namespace dovetail::server {

inline constexpr size_t kMaxRegexBytes = 4096;
inline constexpr int kMaxRegexRepeats = 512;  // of a {n,m}, times those around it

// Spelled out: of the opposite of a class the compiler takes surrogates and overlong forms, too, which are not UTF-8.
inline constexpr char kBeyondAscii[] = "\xc2\x80-\xed\x9f\xbf\xee\x80\x80-\xf4\x8f\xbf\xbf";

enum class RegexUse { kWholeText, kInJson };

// A regular expression as the grammar's compiler gets it; the text matches it from its beginning to its end. Taken are
// alternatives, groups, classes, `.`, \d \w \s and their opposites, quantifiers; ^ and $ at the ends only. In JSON the
// result lets only characters through that need no escape there. kInvalidArgument names `param` and the byte:
// look-ahead, back-references, \b and \p, flags, and what would be repeated too often. Linear in its length.
// Threads: pure.
absl::StatusOr<std::string> EnforceableRegex(const std::string& regex, RegexUse use, const std::string& param);

}  // namespace dovetail::server
