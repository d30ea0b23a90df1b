#include "server/openai/gbnf_rules.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/api_error.h"
#include "server/openai/gbnf_characters.h"

namespace dovetail::server::gbnf {
namespace {

bool InName(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

class Reader {
 public:
  Reader(const std::string& text, const std::string& param) : text_(text), param_(param) {}

  absl::StatusOr<std::vector<Rule>> Read() {
    for (Skip(); at_ < text_.size(); Skip()) {
      const int line = line_;
      const std::string name = Name();
      if (name.empty()) return Bad("a rule begins with its name");
      Skip();
      if (!Take("::=")) return Bad("::= is missing behind ", name);
      DT_ASSIGN_OR_RETURN(const int index, IndexOf(name));
      if (rules_[index].line != 0) return Bad("the rule ", name, " is defined twice");
      rules_[index].line = line;
      DT_ASSIGN_OR_RETURN(auto alternatives, Alternatives(0));
      rules_[index].alternatives = std::move(alternatives);
    }
    for (size_t i = 0; i < rules_.size(); ++i)
      if (rules_[i].line == 0) return BadField(param_, "line ", first_named_[i], ": there is no rule ", rules_[i].name);
    return std::move(rules_);
  }

 private:
  template <typename... Args>
  absl::Status Bad(const Args&... args) const {
    return BadField(param_, "line ", line_, ": ", args...);
  }
  bool At(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool AtAny(std::string_view characters) const {
    return at_ < text_.size() && characters.find(text_[at_]) != std::string_view::npos;
  }
  bool Take(std::string_view token) {
    if (std::string_view(text_).substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  absl::StatusOr<int> IndexOf(const std::string& name) {
    const auto [at, added] = indices_.try_emplace(name, static_cast<int>(rules_.size()));
    if (!added) return at->second;
    if (rules_.size() == kMaxRules) return Bad("more than ", kMaxRules, " rules");
    rules_.push_back({.name = name, .alternatives = {}, .line = 0});
    first_named_.push_back(line_);
    return at->second;
  }

  // White space and comments.
  void Skip() {
    while (at_ < text_.size()) {
      if (At('#')) at_ = std::min(text_.find('\n', at_), text_.size());
      if (!AtAny(" \t\r\n")) return;
      line_ += At('\n') ? 1 : 0;
      ++at_;
    }
  }

  // Whether the next rule begins here.
  bool AtRule() const {
    size_t at = at_;
    while (at < text_.size() && InName(text_[at])) ++at;
    if (at == at_) return false;
    while (at < text_.size() && (text_[at] == ' ' || text_[at] == '\t')) ++at;
    return text_.compare(at, 3, "::=") == 0;
  }

  std::string Name() {
    const size_t begin = at_;
    while (at_ < text_.size() && InName(text_[at_])) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  absl::StatusOr<std::vector<Sequence>> Alternatives(int depth) {
    if (depth > kMaxDepth) return Bad("more than ", kMaxDepth, " groups in one another");
    std::vector<Sequence> all(1);
    for (Skip(); at_ < text_.size() && !At(')') && !AtRule(); Skip()) {
      if (Take("|")) {
        all.emplace_back();
        continue;
      }
      DT_ASSIGN_OR_RETURN(Part part, One(depth));
      DT_RETURN_IF_ERROR(Repetition(part));
      all.back().push_back(std::move(part));
    }
    return all;
  }

  absl::StatusOr<Part> One(int depth) {
    Part part;
    if (Take("\"")) {
      DT_RETURN_IF_ERROR(Literal(part));
    } else if (Take("[")) {
      DT_RETURN_IF_ERROR(Class(part));
    } else if (Take(".")) {
      part.terminal = ClassOf(Normal({}, /*negated=*/true));
    } else if (Take("(")) {
      DT_ASSIGN_OR_RETURN(part.alternatives, Alternatives(depth + 1));
      if (!Take(")")) return Bad("a ) is missing");
    } else if (AtAny("<!")) {
      return Bad("tokens of the model are not supported; write their text");
    } else {
      const std::string name = Name();
      if (name.empty()) return Bad("'", text_.substr(at_, 1), "' begins nothing that a grammar has");
      DT_ASSIGN_OR_RETURN(part.rule, IndexOf(name));
    }
    return part;
  }

  absl::Status Literal(Part& part) {
    std::string text;
    while (!Take("\"")) {
      DT_ASSIGN_OR_RETURN(const uint32_t c, Character());
      if (c == 0) return Bad("no text has the character U+0000");
      text += Spelled(c);
    }
    part.empty = text.empty();
    part.terminal = absl::StrCat("\"", text, "\"");
    return absl::OkStatus();
  }

  absl::Status Class(Part& part) {
    const bool negated = Take("^");
    Ranges ranges;
    while (!Take("]")) {
      DT_ASSIGN_OR_RETURN(const uint32_t first, Character());
      uint32_t last = first;
      if (At('-') && text_.compare(at_, 2, "-]") != 0) {
        ++at_;
        DT_ASSIGN_OR_RETURN(last, Character());
      }
      if (last < first) return Bad("a range of characters ends before it begins");
      ranges.emplace_back(first, last);
    }
    part.terminal = ClassOf(Normal(std::move(ranges), negated));
    if (part.terminal.empty()) return Bad("a class that no character is in");
    return absl::OkStatus();
  }

  // One code point, which may be escaped.
  absl::StatusOr<uint32_t> Character() {
    if (at_ >= text_.size() || At('\n')) return Bad("a literal or class does not end");
    uint32_t c = 0;
    if (!Take("\\")) {
      const model::Utf8Step step = model::NextUtf8(std::string_view(text_).substr(at_));
      at_ += step.length;
      c = step.code_point;
    } else if (at_ >= text_.size()) {
      return Bad("a literal or class does not end");
    } else {
      DT_ASSIGN_OR_RETURN(c, Escape(text_[at_++]));
    }
    if (c > kLastCodePoint || (c >= kFirstSurrogate && c < kBehindSurrogates))
      return Bad("no text has the character ", absl::StrFormat("U+%04X", c));
    return c;
  }

  absl::StatusOr<uint32_t> Escape(char c) {
    switch (c) {
      case 'n': return uint32_t{'\n'};
      case 'r': return uint32_t{'\r'};
      case 't': return uint32_t{'\t'};
      case 'x': return Hex(2);
      case 'u': return Hex(4);
      case 'U': return Hex(8);
      default: break;
    }
    if (std::string_view("\"\\[]-^'/").find(c) == std::string_view::npos)
      return Bad("a \\ stands before \", \\, [, ], -, ^, ', /, n, r, t, x, u or U only");
    return static_cast<uint32_t>(c);
  }

  absl::StatusOr<uint32_t> Hex(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      if (!AtAny("0123456789abcdefABCDEF")) return Bad("an escape needs ", digits, " hexadecimal digits");
      const char c = text_[at_];
      value = value * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return value;
  }

  absl::Status Repetition(Part& part) {
    Skip();
    if (!AtAny("*+?{")) return absl::OkStatus();
    const char sign = text_[at_++];
    if (sign == '*' || sign == '?') part.min = 0;
    if (sign == '*' || sign == '+') part.max = kUnbounded;
    if (sign == '{') DT_RETURN_IF_ERROR(Bounds(part));
    Skip();
    if (AtAny("*+?{")) return Bad("what is repeated cannot be repeated again; put it into brackets");
    return absl::OkStatus();
  }

  // {n}, {n,}, {,m}, {n,m}
  absl::Status Bounds(Part& part) {
    const auto number = [&] {
      Skip();
      int value = -1;
      for (; AtAny("0123456789"); ++at_)
        value = std::min(std::max(value, 0) * 10 + (text_[at_] - '0'), kMaxRepeats + 1);
      Skip();
      return value;
    };
    const int low = number();
    const bool comma = Take(",");
    const int high = comma ? number() : low;
    if (!Take("}") || (low < 0 && high < 0)) return Bad("a repetition is {n}, {n,}, {,m} or {n,m}");
    part.min = std::max(low, 0);
    part.max = high < 0 ? kUnbounded : high;
    if (std::max(part.min, part.max) > kMaxRepeats) return Bad("a repetition of more than ", kMaxRepeats);
    if (part.max == 0) return Bad("a repetition of at most 0; leave it out");
    if (high >= 0 && part.max < part.min) return Bad("a repetition of at least ", low, " and at most ", high);
    return absl::OkStatus();
  }

  const std::string& text_;
  const std::string& param_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Rule> rules_;
  std::vector<int> first_named_;  // the line, by rule
  absl::flat_hash_map<std::string, int> indices_;
};

}  // namespace

absl::StatusOr<std::vector<Rule>> ReadRules(const std::string& text, const std::string& param) {
  return Reader(text, param).Read();
}

}  // namespace dovetail::server::gbnf
