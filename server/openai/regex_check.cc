#include "server/openai/regex_check.h"

#include <bitset>
#include <cctype>
#include <optional>

#include "server/openai/api_error.h"

namespace dovetail::server {
namespace {

using Ascii = std::bitset<128>;
constexpr int kMaxGroups = 32;  // inside one another

Ascii Range(int first, int last) {
  Ascii set;
  for (int c = first; c <= last; ++c) set.set(c);
  return set;
}
const Ascii kPrintable = Range(' ', '~');
const Ascii kDigits = Range('0', '9');
const Ascii kWord = Range('a', 'z') | Range('A', 'Z') | kDigits | Range('_', '_');
const Ascii kSpaces = Range('\t', '\n') | Range('\r', '\r') | Range(' ', ' ');
const Ascii kNotInJson = Range(0, 31) | Range('"', '"') | Range('\\', '\\') | Range(127, 127);

bool IsOneOf(char c, const char* of) { return c != 0 && std::string(of).find(c) != std::string::npos; }

class RegexChecker {
 public:
  RegexChecker(const std::string& regex, RegexUse use, const std::string& param)
      : in_(regex), json_(use == RegexUse::kInJson), param_(param) {}

  absl::StatusOr<std::string> Check() {
    if (in_.empty()) return Refuse("is empty");
    if (in_.size() > kMaxRegexBytes)
      return BadField(param_, in_.size(), " bytes; at most ", kMaxRegexBytes, " are allowed");
    if (Peek() == '^') ++at_;
    DT_RETURN_IF_ERROR(Alternatives(0, 1).status());
    if (at_ < in_.size()) return Refuse("a group is closed that was not opened");
    return out_;
  }

 private:
  char Peek() const { return at_ < in_.size() ? in_[at_] : '\0'; }
  template <typename... Args>
  absl::Status Refuse(const Args&... what) const {
    return BadField(param_, "at byte ", at_, ": ", what...);
  }

  // Returns how often, at most, the largest repetition inside repeats.
  absl::StatusOr<int64_t> Alternatives(int depth, int64_t) {
    if (depth > kMaxGroups) return Refuse("more than ", kMaxGroups, " groups inside one another");
    int64_t most = 1;
    bool empty = true;
    while (at_ < in_.size() && Peek() != ')') {
      if (Peek() == '|') {
        if (empty) return Refuse("an alternative is empty");
        out_ += in_[at_++];
        empty = true;
        continue;
      }
      if (Peek() == '$' && at_ + 1 == in_.size() && depth == 0) {
        ++at_;
        if (empty) return Refuse("an alternative is empty");
        return most;
      }
      DT_ASSIGN_OR_RETURN(int64_t inside, Atom(depth));
      DT_ASSIGN_OR_RETURN(const int64_t times, Quantifier());
      inside *= times;
      if (inside > kMaxRegexRepeats) return Refuse("repeats a part more than ", kMaxRegexRepeats, " times");
      most = std::max(most, inside);
      empty = false;
    }
    if (empty) return Refuse("an alternative is empty");
    return most;
  }

  absl::StatusOr<int64_t> Atom(int depth) {
    const char c = Peek();
    if (c == '(') return Group(depth);
    if (c == '[') return Class();
    if (c == '.') {
      ++at_;
      Emit(Range('\n', '\n') | Range('\r', '\r'), /*negated=*/true);
      return 1;
    }
    if (c == '\\') return Escape();
    if (IsOneOf(c, "*+?{")) return Refuse("a quantifier without anything before it");
    if (IsOneOf(c, "^$")) return Refuse(std::string(1, c), " is enforced at the ends only");
    return Literal();
  }

  absl::StatusOr<int64_t> Literal() {
    const char c = in_[at_];
    if (json_ && static_cast<unsigned char>(c) < 128 && kNotInJson.test(c))
      return Refuse("a character that JSON escapes is not enforced in a pattern");
    if (IsOneOf(c, "]})")) out_ += '\\';
    out_ += in_[at_++];
    while (at_ < in_.size() && (in_[at_] & 0xc0) == 0x80) out_ += in_[at_++];  // the rest of a UTF-8 character
    return 1;
  }

  absl::StatusOr<int64_t> Group(int depth) {
    ++at_;
    if (Peek() == '?') {
      if (in_.compare(at_, 2, "?:") != 0) return Refuse("look-around, named groups and flags are not enforced");
      at_ += 2;
    }
    out_ += '(';
    DT_ASSIGN_OR_RETURN(const int64_t inside, Alternatives(depth + 1, 1));
    if (Peek() != ')') return Refuse("a group is not closed");
    ++at_;
    out_ += ')';
    return inside;
  }

  // \d and the like; nullopt: another escape.
  static std::optional<Ascii> Shorthand(char c) {
    switch (c) {
      case 'd': return kDigits;
      case 'D': return kPrintable & ~kDigits;
      case 'w': return kWord;
      case 'W': return kPrintable & ~kWord;
      case 's': return kSpaces;
      case 'S': return kPrintable & ~kSpaces;
      default: return std::nullopt;
    }
  }
  static std::optional<char> Escaped(char c) {
    if (c == 'n') return '\n';
    if (c == 'r') return '\r';
    if (c == 't') return '\t';
    if (c != 0 && std::ispunct(static_cast<unsigned char>(c))) return c;
    return std::nullopt;
  }

  absl::StatusOr<int64_t> Escape() {
    ++at_;
    Ascii set;
    if (const auto shorthand = Shorthand(Peek())) {
      set = *shorthand;
    } else if (const auto c = Escaped(Peek())) {
      if (json_ && kNotInJson.test(*c)) return Refuse("a character that JSON escapes is not enforced in a pattern");
      set.set(*c);
    } else {
      return Refuse("the escape \\", std::string(1, Peek()), " is not enforced");
    }
    ++at_;
    Emit(set, /*negated=*/false);
    return 1;
  }

  absl::StatusOr<int64_t> Class() {
    ++at_;
    const bool negated = Peek() == '^';
    if (negated) ++at_;
    Ascii set;
    bool shorthand = false;
    do {
      if (at_ >= in_.size()) return Refuse("a class is not closed");
      DT_RETURN_IF_ERROR(ClassPart(set, shorthand));
    } while (Peek() != ']');
    ++at_;
    // What \w and the like mean beyond ASCII differs from reader to reader.
    const bool within_ascii = negated && shorthand;
    const Ascii left = (within_ascii ? kPrintable & ~set : set) & (json_ ? ~kNotInJson : ~Ascii());
    if ((!negated || within_ascii) && left.none()) return Refuse("a class has no character that may stand here");
    Emit(within_ascii ? left : set, negated && !within_ascii);
    return 1;
  }

  absl::StatusOr<char> ClassChar() {
    char c = Peek();
    if (c == '\\') {
      ++at_;
      const auto escaped = Escaped(Peek());
      if (!escaped) return Refuse("the escape \\", std::string(1, Peek()), " is not enforced in a class");
      c = *escaped;
    }
    if (static_cast<unsigned char>(c) >= 127 || (static_cast<unsigned char>(c) < 32 && !kSpaces.test(c)))
      return Refuse("only printable ASCII characters are enforced in a class");
    ++at_;
    return c;
  }

  absl::Status ClassPart(Ascii& set, bool& shorthand) {
    if (Peek() == '[' || in_.compare(at_, 2, "&&") == 0) return Refuse("escape [ and & in a class");
    if (Peek() == '\\' && at_ + 1 < in_.size()) {
      if (const auto of = Shorthand(in_[at_ + 1])) {
        set |= *of;
        shorthand = true;
        at_ += 2;
        return absl::OkStatus();
      }
    }
    DT_ASSIGN_OR_RETURN(const char first, ClassChar());
    char last = first;
    if (Peek() == '-' && at_ + 1 < in_.size() && in_[at_ + 1] != ']') {
      ++at_;
      DT_ASSIGN_OR_RETURN(last, ClassChar());
      if (last < first) return Refuse("a range is in the wrong order");
    }
    set |= Range(first, last);
    return absl::OkStatus();
  }

  static void AppendClassChar(int c, std::string& out) {
    constexpr char kHex[] = "0123456789abcdef";
    if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (c < 32 || c == 127) {
      out += std::string("\\x") + kHex[c >> 4] + kHex[c & 15];
    } else {
      if (IsOneOf(static_cast<char>(c), "]\\^-[")) out += '\\';
      out += static_cast<char>(c);
    }
  }

  void Emit(Ascii set, bool negated) {
    if (negated) set = (kPrintable | kSpaces) & ~set;
    if (json_) set &= ~kNotInJson;
    out_ += '[';
    for (int c = 0; c < 128; ++c)
      if (set.test(c)) AppendClassChar(c, out_);
    if (negated) out_ += kBeyondAscii;
    out_ += ']';
  }

  // How often, at most; an open end counts as the least.
  absl::StatusOr<int64_t> Quantifier() {
    int64_t times = 1;
    if (Peek() == '?' && out_.back() == ')') {
      // xgrammar 0.2.8 takes (ab{1,6})? for a?b{1,6}|nothing.
      out_ += "{0,1}";
      ++at_;
    } else if (IsOneOf(Peek(), "*+?")) {
      out_ += in_[at_++];
    } else if (Peek() == '{') {
      DT_ASSIGN_OR_RETURN(times, Counts());
    } else {
      return 1;
    }
    if (Peek() == '?') ++at_;  // as few as possible: the same texts
    if (IsOneOf(Peek(), "*+?{")) return Refuse("two quantifiers in a row");
    return times;
  }

  absl::StatusOr<int64_t> Number() {
    if (!std::isdigit(static_cast<unsigned char>(Peek()))) return Refuse("a number is missing in {}");
    int64_t number = 0;
    while (std::isdigit(static_cast<unsigned char>(Peek()))) {
      number = number * 10 + (Peek() - '0');
      if (number > kMaxRegexRepeats) return Refuse("repeats a part more than ", kMaxRegexRepeats, " times");
      ++at_;
    }
    return number;
  }

  absl::StatusOr<int64_t> Counts() {
    ++at_;
    DT_ASSIGN_OR_RETURN(const int64_t least, Number());
    absl::StrAppend(&out_, "{", least);
    int64_t most = least;
    if (Peek() == ',') {
      ++at_;
      out_ += ',';
      if (Peek() != '}') {
        DT_ASSIGN_OR_RETURN(most, Number());
        if (most < least) return Refuse("{", least, ",", most, "} is in the wrong order");
        absl::StrAppend(&out_, most);
      }
    }
    if (Peek() != '}') return Refuse("{ is not closed");
    ++at_;
    out_ += '}';
    return std::max<int64_t>(most, 1);
  }

  const std::string& in_;
  const bool json_;
  const std::string& param_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> EnforceableRegex(const std::string& regex, RegexUse use, const std::string& param) {
  return RegexChecker(regex, use, param).Check();
}

}  // namespace dovetail::server
