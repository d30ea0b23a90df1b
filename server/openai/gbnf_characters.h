#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/openai/gbnf_rules.h"

// Characters as terminals of a grammar (gbnf_rules.h), in the notation of the compiler.
// Threads: pure.

namespace dovetail::server::gbnf {

inline constexpr uint32_t kLastCodePoint = 0x10FFFF, kFirstSurrogate = 0xD800, kBehindSurrogates = 0xE000;

// Code points, first and last of each range; neither in order nor apart.
using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;

// The ranges in order and apart, without U+0000 and surrogates, which no text has; or all other code points.
Ranges Normal(Ranges ranges, bool negated);

// What the characters of a grammar stand in.
enum class Spelling {
  kText,  // a text of their own
  kJson,  // a JSON string: '"', '\' and control characters are escaped, each in one way
};

// In literals and classes of the compiler's notation.
std::string Spelled(uint32_t c);

// One of the characters of these ranges, which are normal, as a class. Empty: there is none.
std::string ClassOf(const Ranges& ranges);

// A text. One of the characters of these ranges, which are normal: in JSON, control characters without an escape of one
// letter are left out of what `negated` says to be an opposite. Nothing is left: a part that is empty and has neither
// a terminal nor alternatives.
Part LiteralPart(const std::vector<uint32_t>& text, Spelling spelling);
Part ClassPart(const Ranges& ranges, bool negated, Spelling spelling);

}  // namespace dovetail::server::gbnf
