#include "server/openai/lark_regex.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::server::lark {
namespace {

using gbnf::Part;
using gbnf::Ranges;
using gbnf::Sequence;

const Ranges kDigits = {{'0', '9'}}, kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
             kSpaces = {{'\t', '\r'}, {' ', ' '}};

// The characters of a class that a letter stands for; nothing: it is no such letter.
Ranges ClassOfLetter(char letter) {
  const auto within = [](const Ranges& taken) {  // printable ASCII that they leave out
    Ranges others;
    for (uint32_t c = ' '; c <= '~'; ++c)
      if (std::none_of(taken.begin(), taken.end(), [c](const auto& r) { return r.first <= c && c <= r.second; }))
        others.emplace_back(c, c);
    return others;
  };
  switch (letter) {
    case 'd': return kDigits;
    case 'w': return kWord;
    case 's': return kSpaces;
    case 'D': return within(kDigits);
    case 'W': return within(kWord);
    case 'S': return within(kSpaces);
    default: return {};
  }
}

Ranges InBothCases(const Ranges& ranges) {
  Ranges all = ranges;
  for (uint32_t c = 'A'; c <= 'Z'; ++c)
    for (const auto& [first, last] : ranges) {
      if (first <= c && c <= last) all.emplace_back(c + 32, c + 32);
      if (first <= c + 32 && c + 32 <= last) all.emplace_back(c, c);
    }
  return all;
}

Part Group(std::vector<Sequence> alternatives) {
  Part part;
  part.alternatives = std::move(alternatives);
  return part;
}

class Reader {
 public:
  Reader(std::string_view pattern, std::string_view flags, gbnf::Spelling spelling)
      : in_(pattern), flags_(flags), spelling_(spelling) {}

  absl::StatusOr<Part> Read() {
    for (const char flag : flags_)
      if (std::string_view("imsu").find(flag) == std::string_view::npos)
        return Bad("the flag ", std::string(1, flag), " is not supported; i, m, s and u are");
    DT_ASSIGN_OR_RETURN(auto alternatives, Alternatives(0));
    if (at_ < in_.size()) return Bad("a ) closes nothing");
    return Group(std::move(alternatives));
  }

 private:
  template <typename... Args>
  absl::Status Bad(const Args&... what) const {
    return InvalidArgument("byte ", at_, " of the regular expression: ", what...);
  }
  bool At(char c) const { return at_ < in_.size() && in_[at_] == c; }
  bool Take(std::string_view text) {
    if (in_.substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }
  bool ignores_case() const { return flags_.find('i') != std::string_view::npos; }

  absl::StatusOr<std::vector<Sequence>> Alternatives(int depth) {
    if (depth > kMaxGroups) return Bad("more than ", kMaxGroups, " groups inside one another");
    std::vector<Sequence> all(1);
    while (at_ < in_.size() && !At(')')) {
      if (Take("|")) {
        all.emplace_back();
        continue;
      }
      DT_ASSIGN_OR_RETURN(Part part, Atom(depth));
      DT_RETURN_IF_ERROR(Quantifier(part));
      all.back().push_back(std::move(part));
    }
    return all;
  }

  absl::StatusOr<Part> Atom(int depth) {
    if (At('^') || At('$')) return Bad(std::string(1, in_[at_]), " is not supported: a terminal is matched as a whole");
    if (At('*') || At('+') || At('?')) return Bad("nothing stands before ", std::string(1, in_[at_]));
    if (Take("(")) {
      DT_RETURN_IF_ERROR(BeginGroup());
      DT_ASSIGN_OR_RETURN(auto alternatives, Alternatives(depth + 1));
      if (!Take(")")) return Bad("a ) is missing");
      return Group(std::move(alternatives));
    }
    if (Take("[")) return Class();
    if (Take(".")) {
      const bool lines = flags_.find('s') != std::string_view::npos;
      return OfClass(lines ? Ranges() : Ranges{{'\n', '\n'}}, /*negated=*/true);
    }
    if (At('\\') && at_ + 1 < in_.size()) {
      if (const Ranges letters = ClassOfLetter(in_[at_ + 1]); !letters.empty()) {
        at_ += 2;
        return OfClass(letters, /*negated=*/false);
      }
    }
    DT_ASSIGN_OR_RETURN(const uint32_t c, Character(/*in_class=*/false));
    return PartOfText({c}, ignores_case(), spelling_);
  }

  // Behind the (.
  absl::Status BeginGroup() {
    if (!Take("?") || Take(":")) return absl::OkStatus();
    if (Take("P<") || (At('<') && in_.substr(at_, 2) != "<=" && in_.substr(at_, 2) != "<!" && Take("<"))) {
      const size_t end = in_.find('>', at_);
      if (end == std::string_view::npos) return Bad("the name of a group does not end");
      at_ = end + 1;
      return absl::OkStatus();
    }
    const bool around = At('=') || At('!') || At('<');
    return Bad(around ? "look-around is not supported" : "this kind of group is not supported");
  }

  absl::StatusOr<Part> OfClass(Ranges ranges, bool negated) const {
    if (ignores_case()) ranges = InBothCases(ranges);
    Part part = gbnf::ClassPart(gbnf::Normal(std::move(ranges), negated), negated, spelling_);
    if (part.terminal.empty() && part.alternatives.empty()) return Bad("a class that no character is in");
    return part;
  }

  absl::StatusOr<Part> Class() {
    const bool negated = Take("^");
    Ranges ranges;
    for (bool first = true; first || !At(']'); first = false) {
      if (at_ >= in_.size()) return Bad("a class does not end");
      if (At('\\') && at_ + 1 < in_.size()) {
        if (const Ranges letters = ClassOfLetter(in_[at_ + 1]); !letters.empty()) {
          ranges.insert(ranges.end(), letters.begin(), letters.end());
          at_ += 2;
          continue;
        }
      }
      DT_ASSIGN_OR_RETURN(const uint32_t low, Character(/*in_class=*/true));
      uint32_t high = low;
      if (At('-') && at_ + 1 < in_.size() && in_[at_ + 1] != ']') {
        ++at_;
        if (At('\\') && at_ + 1 < in_.size() && !ClassOfLetter(in_[at_ + 1]).empty())
          return Bad("a range ends with a class");
        DT_ASSIGN_OR_RETURN(high, Character(/*in_class=*/true));
      }
      if (high < low) return Bad("a range of characters ends before it begins");
      ranges.emplace_back(low, high);
    }
    ++at_;
    return OfClass(std::move(ranges), negated);
  }

  // One code point, which may be escaped.
  absl::StatusOr<uint32_t> Character(bool in_class) {
    if (at_ >= in_.size()) return Bad("ends too early");
    uint32_t c = 0;
    if (!Take("\\")) {
      const model::Utf8Step step = model::NextUtf8(in_.substr(at_));
      if (step.kind != model::Utf8Kind::kValid) return Bad("is no UTF-8");
      at_ += step.length;
      c = step.code_point;
    } else if (at_ >= in_.size()) {
      return Bad("a \\ stands at the end");
    } else {
      DT_ASSIGN_OR_RETURN(c, Escape(in_[at_++], in_class));
    }
    if (c == 0 || c > gbnf::kLastCodePoint || (c >= gbnf::kFirstSurrogate && c < gbnf::kBehindSurrogates))
      return Bad("no text has the character ", c);
    if (ignores_case() && c >= 128) return Bad("the flag i is for ASCII only");
    return c;
  }

  absl::StatusOr<uint32_t> Escape(char c, bool in_class) {
    switch (c) {
      case 'n': return uint32_t{'\n'};
      case 'r': return uint32_t{'\r'};
      case 't': return uint32_t{'\t'};
      case 'f': return uint32_t{'\f'};
      case 'v': return uint32_t{'\v'};
      case 'x': return Hex(2);
      case 'u': return Hex(4);
      case 'U': return Hex(8);
      case 'b':
        if (in_class) return uint32_t{'\b'};
        break;
      default: break;
    }
    if (absl::ascii_isdigit(static_cast<unsigned char>(c))) return Bad("back-references are not supported");
    if (absl::ascii_isalpha(static_cast<unsigned char>(c))) return Bad("\\", std::string(1, c), " is not supported");
    if (static_cast<unsigned char>(c) >= 128) return Bad("a \\ stands before a character that needs none");
    return static_cast<uint32_t>(c);
  }

  absl::StatusOr<uint32_t> Hex(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      if (at_ >= in_.size() || !absl::ascii_isxdigit(static_cast<unsigned char>(in_[at_])))
        return Bad("an escape needs ", digits, " hexadecimal digits");
      const char c = in_[at_];
      value = value * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return value;
  }

  absl::Status Quantifier(Part& part) {
    if (Take("*")) {
      part.min = 0, part.max = gbnf::kUnbounded;
    } else if (Take("+")) {
      part.max = gbnf::kUnbounded;
    } else if (Take("?")) {
      part.min = 0;
    } else if (At('{') && at_ + 1 < in_.size() && (absl::ascii_isdigit(in_[at_ + 1]) || in_[at_ + 1] == ',')) {
      DT_RETURN_IF_ERROR(Bounds(part));
    } else {
      return absl::OkStatus();
    }
    Take("?");  // lazy
    if (At('+')) return Bad("possessive quantifiers are not supported");
    if (At('*') || At('?')) return Bad("what is repeated cannot be repeated again; put it into brackets");
    return absl::OkStatus();
  }

  absl::Status Bounds(Part& part) {
    ++at_;
    const auto number = [&] {
      int value = -1;
      for (; at_ < in_.size() && absl::ascii_isdigit(static_cast<unsigned char>(in_[at_])); ++at_)
        value = std::min(std::max(value, 0) * 10 + (in_[at_] - '0'), gbnf::kMaxRepeats + 1);
      return value;
    };
    const int low = number();
    const bool comma = Take(",");
    const int high = comma ? number() : low;
    if (!Take("}") || (low < 0 && high < 0)) return Bad("a repetition is {n}, {n,}, {,m} or {n,m}");
    part.min = std::max(low, 0);
    part.max = high < 0 ? gbnf::kUnbounded : high;
    if (std::max(part.min, part.max) > gbnf::kMaxRepeats) return Bad("a repetition of more than ", gbnf::kMaxRepeats);
    if (part.max == 0) return Bad("a repetition of at most 0; leave it out");
    if (high >= 0 && part.max < part.min) return Bad("a repetition of at least ", low, " and at most ", high);
    return absl::OkStatus();
  }

  const std::string_view in_;
  const std::string_view flags_;
  const gbnf::Spelling spelling_;
  size_t at_ = 0;
};

}  // namespace

absl::StatusOr<Part> PartOfRegex(std::string_view pattern, std::string_view flags, gbnf::Spelling spelling) {
  return Reader(pattern, flags, spelling).Read();
}

Part PartOfText(const std::vector<uint32_t>& text, bool ignore_case, gbnf::Spelling spelling) {
  if (!ignore_case) return gbnf::LiteralPart(text, spelling);
  Sequence sequence;
  for (const uint32_t c : text) {
    const bool letter = c < 128 && absl::ascii_isalpha(static_cast<unsigned char>(c));
    sequence.push_back(letter ? gbnf::ClassPart(gbnf::Normal(InBothCases({{c, c}}), /*negated=*/false),
                                                /*negated=*/false, spelling)
                              : gbnf::LiteralPart({c}, spelling));
  }
  if (sequence.empty()) sequence.push_back(gbnf::LiteralPart({}, spelling));
  return Group({std::move(sequence)});
}

}  // namespace dovetail::server::lark
