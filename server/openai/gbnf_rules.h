#pragma once
#include <string>
#include <vector>

#include "base/status.h"

// The rules of a grammar in GBNF as values.

namespace dovetail::server::gbnf {

inline constexpr int kMaxRules = 1000;
inline constexpr int kMaxRepeats = 20'000;  // of one part
inline constexpr int kMaxDepth = 32;        // of groups
inline constexpr int kUnbounded = -1;

struct Part;
using Sequence = std::vector<Part>;

// A literal, a class of characters, a reference to a rule, or a group; with its repetition.
struct Part {
  std::string terminal;                // literal or class in the notation of the compiler; else empty
  bool empty = false;                  // the literal ""
  int rule = -1;                       // the index of the rule that is referred to; -1: none
  std::vector<Sequence> alternatives;  // of a group
  int min = 1;
  int max = 1;  // or kUnbounded
};

struct Rule {
  std::string name;
  std::vector<Sequence> alternatives;
  int line = 0;
};

// In the order in which the text first names them. kInvalidArgument names `param`, the line, and what is wrong there:
// no such syntax, a rule that is defined twice or not at all, a limit above, or tokens of the model (`<...>`), which
// are not supported. Linear in the text, which is UTF-8.
// Threads: pure.
absl::StatusOr<std::vector<Rule>> ReadRules(const std::string& text, const std::string& param);

}  // namespace dovetail::server::gbnf
