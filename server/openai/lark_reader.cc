#include "server/openai/lark_reader.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/api_error.h"
#include "server/openai/lark_regex.h"

namespace dovetail::server::lark {
namespace {

using gbnf::Part;
using gbnf::Rule;
using gbnf::Sequence;

bool InName(char c) { return c == '_' || absl::ascii_isalnum(static_cast<unsigned char>(c)); }

// Of a name, which is a rule's otherwise.
bool IsTerminal(std::string_view name) {
  const size_t letter = name.find_first_not_of('_');
  return letter != std::string_view::npos && absl::ascii_isupper(static_cast<unsigned char>(name[letter]));
}

bool HasIgnore(std::string_view text) {
  for (size_t at = text.find("%ignore"); at != std::string_view::npos; at = text.find("%ignore", at + 1)) {
    const size_t line = text.substr(0, at).find_last_not_of(" \t");
    if (line == std::string_view::npos || text[line] == '\n') return true;
  }
  return false;
}

Part Reference(int rule) {
  Part part;
  part.rule = rule;
  return part;
}

class Reader {
 public:
  Reader(const std::string& text, const std::string& param, gbnf::Spelling spelling)
      : text_(text), param_(param), spelling_(spelling) {}

  absl::StatusOr<Grammar> Read() {
    if (HasIgnore(text_)) {
      DT_ASSIGN_OR_RETURN(ignored_, IndexOf("%ignore"));
      rules_[ignored_].line = 1;
    }
    for (SkipLines(); at_ < text_.size(); SkipLines()) DT_RETURN_IF_ERROR(At('%') ? Directive() : Definition());
    const auto start = indices_.find("start");
    if (start == indices_.end() || rules_[start->second].line == 0) return BadField(param_, "has no rule start");
    for (size_t i = 0; i < rules_.size(); ++i)
      if (rules_[i].line == 0)
        return BadField(param_, "line ", first_named_[i], ": there is no ", KindOf(rules_[i].name), " ",
                        rules_[i].name);
    DT_RETURN_IF_ERROR(CheckTerminals());
    return Finished(start->second);
  }

 private:
  template <typename... Args>
  absl::Status Bad(const Args&... args) const {
    return BadField(param_, "line ", line_, ": ", args...);
  }
  static const char* KindOf(std::string_view name) { return IsTerminal(name) ? "terminal" : "rule"; }
  bool At(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool AtText(std::string_view text) const { return std::string_view(text_).substr(at_, text.size()) == text; }
  bool Take(std::string_view text) {
    if (!AtText(text)) return false;
    at_ += text.size();
    return true;
  }

  // ---- white space ----

  void SkipBlanks() {
    while (at_ < text_.size() && (At(' ') || At('\t') || At('\r'))) ++at_;
    if (AtText("//") || At('#')) at_ = std::min(text_.find('\n', at_), text_.size());
  }
  void SkipLines() {
    for (SkipBlanks(); At('\n'); SkipBlanks()) {
      ++at_;
      ++line_;
    }
  }
  // In a definition, which goes on in the next line inside brackets, or where that begins with a |.
  void SkipInside(int depth) {
    SkipBlanks();
    if (!At('\n')) return;
    const size_t at = at_;
    const int line = line_;
    SkipLines();
    if (depth > 0 || At('|')) return;
    at_ = at;
    line_ = line;
  }

  std::string Name() {
    const size_t begin = at_;
    while (at_ < text_.size() && InName(text_[at_])) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  absl::StatusOr<int> IndexOf(const std::string& name) {
    const auto [at, added] = indices_.try_emplace(name, static_cast<int>(rules_.size()));
    if (!added) return at->second;
    if (rules_.size() == gbnf::kMaxRules) return Bad("more than ", gbnf::kMaxRules, " rules and terminals");
    rules_.push_back({.name = name, .alternatives = {}, .line = 0});
    first_named_.push_back(line_);
    return at->second;
  }

  absl::Status Define(const std::string& name, int line, std::vector<Sequence> alternatives) {
    DT_ASSIGN_OR_RETURN(const int index, IndexOf(name));
    if (rules_[index].line != 0) return Bad("the ", KindOf(name), " ", name, " is defined twice");
    rules_[index].line = line;
    rules_[index].alternatives = std::move(alternatives);
    return absl::OkStatus();
  }

  // ---- statements ----

  absl::Status Definition() {
    const int line = line_;
    while (At('?') || At('!')) ++at_;  // of trees
    const std::string name = Name();
    if (name.empty()) return Bad("'", text_.substr(at_, 1), "' begins no rule, terminal or directive");
    if (At('{')) return Bad("templates are not supported; write the rule ", name, " out");
    SkipBlanks();
    if (Take(".")) {  // the priority
      if (At('-')) ++at_;
      Name();
      SkipBlanks();
    }
    if (!Take(":")) return Bad("a : is missing behind ", name);
    in_terminal_ = IsTerminal(name);
    DT_ASSIGN_OR_RETURN(auto alternatives, Alternatives(0));
    if (at_ < text_.size() && !At('\n')) return Bad("'", text_.substr(at_, 1), "' begins nothing that a rule has");
    return Define(name, line, std::move(alternatives));
  }

  absl::Status Directive() {
    ++at_;
    const std::string name = Name();
    SkipBlanks();
    if (name == "import") return Import();
    if (name != "ignore") return Bad("%", name, " is not supported; %ignore and %import common are");
    in_terminal_ = true;
    DT_ASSIGN_OR_RETURN(auto alternatives, Alternatives(0));
    auto& all = rules_[ignored_].alternatives;
    std::move(alternatives.begin(), alternatives.end(), std::back_inserter(all));
    return absl::OkStatus();
  }

  absl::Status Import() {
    if (!Take("common")) return Bad("%import is supported of common alone");
    SkipBlanks();
    if (Take("(")) {
      do {
        SkipInside(1);
        const std::string name = Name();
        DT_RETURN_IF_ERROR(ImportAs(name, name));
        SkipInside(1);
      } while (Take(","));
      return Take(")") ? absl::OkStatus() : Bad("a ) is missing");
    }
    if (!Take(".")) return Bad("%import has the form %import common.NAME");
    const std::string name = Name();
    SkipBlanks();
    if (!Take("->")) return ImportAs(name, name);
    SkipBlanks();
    const std::string alias = Name();
    if (!IsTerminal(alias)) return Bad("a terminal's name is in capitals, not '", alias, "'");
    return ImportAs(name, alias);
  }

  absl::Status ImportAs(const std::string& name, const std::string& alias) {
    const char* const known = CommonTerminal(name);
    if (known == nullptr) return Bad("common has no terminal '", name, "'");
    DT_ASSIGN_OR_RETURN(Part part, PartOfRegex(known, "", spelling_));
    return Define(alias, line_, {{std::move(part)}});
  }

  // ---- what definitions are made of ----

  absl::StatusOr<std::vector<Sequence>> Alternatives(int depth) {
    if (depth > gbnf::kMaxDepth) return Bad("more than ", gbnf::kMaxDepth, " groups in one another");
    std::vector<Sequence> all(1);
    for (SkipInside(depth); at_ < text_.size() && !At('\n') && !At(')') && !At(']'); SkipInside(depth)) {
      if (Take("|")) {
        all.emplace_back();
        continue;
      }
      if (Take("->")) {  // of trees
        SkipBlanks();
        if (Name().empty()) return Bad("a name is missing behind ->");
        SkipInside(depth);
        if (at_ < text_.size() && !At('|') && !At('\n') && !At(')') && !At(']'))
          return Bad("-> stands at the end of an alternative only");
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
    for (const auto& [open, close] : {std::pair{"(", ")"}, {"[", "]"}}) {
      if (!Take(open)) continue;
      DT_ASSIGN_OR_RETURN(part.alternatives, Alternatives(depth + 1));
      if (!Take(close)) return Bad("a ", close, " is missing");
      if (*open == '[') part.min = 0;
      return part;
    }
    if (At('"')) {
      DT_ASSIGN_OR_RETURN(part, StringOrRange());
      return Terminal(std::move(part));
    }
    if (Take("/")) {
      DT_ASSIGN_OR_RETURN(part, Regex());
      return Terminal(std::move(part));
    }
    const std::string name = Name();
    if (name.empty()) return Bad("'", text_.substr(at_, 1), "' begins nothing that a rule has");
    if (At('{')) return Bad("templates are not supported; write ", name, " out");
    if (in_terminal_ && !IsTerminal(name)) return Bad("the rule ", name, " stands in a terminal");
    DT_ASSIGN_OR_RETURN(const int rule, IndexOf(name));
    return IsTerminal(name) ? Terminal(Reference(rule)) : Reference(rule);
  }

  // In a rule, what is ignored may follow it.
  Part Terminal(Part part) const {
    if (in_terminal_ || ignored_ < 0) return part;
    Part group;
    group.alternatives = {{std::move(part), Reference(ignored_)}};
    return group;
  }

  absl::StatusOr<Part> StringOrRange() {
    DT_ASSIGN_OR_RETURN(const std::vector<uint32_t> text, String());
    if (Take("..")) {
      if (!At('"')) return Bad("a range has the form \"a\"..\"z\"");
      DT_ASSIGN_OR_RETURN(const std::vector<uint32_t> last, String());
      if (text.size() != 1 || last.size() != 1) return Bad("a range is from one character to another");
      if (last[0] < text[0]) return Bad("a range of characters ends before it begins");
      return gbnf::ClassPart(gbnf::Normal({{text[0], last[0]}}, /*negated=*/false), /*negated=*/false, spelling_);
    }
    const bool ignore_case = At('i') && (at_ + 1 == text_.size() || !InName(text_[at_ + 1])) && Take("i");
    if (ignore_case && std::any_of(text.begin(), text.end(), [](uint32_t c) { return c >= 128; }))
      return Bad("the flag i is for ASCII only");
    return PartOfText(text, ignore_case, spelling_);
  }

  absl::StatusOr<std::vector<uint32_t>> String() {
    ++at_;
    std::vector<uint32_t> text;
    while (!Take("\"")) {
      if (at_ >= text_.size() || At('\n')) return Bad("a string does not end");
      uint32_t c = 0;
      if (Take("\\")) {
        DT_ASSIGN_OR_RETURN(c, Escape());
      } else {
        const model::Utf8Step step = model::NextUtf8(std::string_view(text_).substr(at_));
        at_ += step.length;
        c = step.code_point;
      }
      if (c == 0 || c > gbnf::kLastCodePoint || (c >= gbnf::kFirstSurrogate && c < gbnf::kBehindSurrogates))
        return Bad("no text has the character ", c);
      text.push_back(c);
    }
    return text;
  }

  absl::StatusOr<uint32_t> Escape() {
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    const auto hex = [this](int digits) -> absl::StatusOr<uint32_t> {
      uint32_t value = 0;
      for (int i = 0; i < digits; ++i, ++at_) {
        if (at_ >= text_.size() || !absl::ascii_isxdigit(static_cast<unsigned char>(text_[at_])))
          return Bad("an escape needs ", digits, " hexadecimal digits");
        const char digit = text_[at_];
        value = value * 16 + static_cast<uint32_t>(digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
      }
      return value;
    };
    switch (c) {
      case 'n': return uint32_t{'\n'};
      case 'r': return uint32_t{'\r'};
      case 't': return uint32_t{'\t'};
      case 'f': return uint32_t{'\f'};
      case 'v': return uint32_t{'\v'};
      case 'x': return hex(2);
      case 'u': return hex(4);
      case 'U': return hex(8);
      case '"':
      case '\\':
      case '/': return static_cast<uint32_t>(c);
      default: return Bad("in a string, \\ stands before \", \\, /, n, r, t, f, v, x, u or U only");
    }
  }

  absl::StatusOr<Part> Regex() {
    const size_t begin = at_;
    while (at_ < text_.size() && !At('/')) {
      if (At('\n')) return Bad("a regular expression does not end");
      at_ += At('\\') ? 2 : 1;
    }
    if (at_ >= text_.size()) return Bad("a regular expression does not end");
    const std::string pattern = text_.substr(begin, at_ - begin);
    const size_t flags = ++at_;
    while (at_ < text_.size() && absl::ascii_islower(static_cast<unsigned char>(text_[at_]))) ++at_;
    auto part = PartOfRegex(pattern, std::string_view(text_).substr(flags, at_ - flags), spelling_);
    if (!part.ok()) return Bad(part.status().message());
    return part;
  }

  absl::Status Repetition(Part& part) {
    const auto repeat = [&part](int min, int max) {
      if (part.min != 1 || part.max != 1) {  // it has a repetition of its own: [x]*
        Part group;
        group.alternatives = {{std::move(part)}};
        part = std::move(group);
      }
      part.min = min;
      part.max = max;
    };
    if (Take("*")) {
      repeat(0, gbnf::kUnbounded);
    } else if (Take("+")) {
      repeat(1, gbnf::kUnbounded);
    } else if (Take("?")) {
      repeat(0, 1);
    } else if (const size_t at = at_; SkipBlanks(), Take("~")) {
      DT_ASSIGN_OR_RETURN(const int low, Number());
      int high = low;
      SkipBlanks();
      if (Take("..")) {
        DT_ASSIGN_OR_RETURN(high, Number());
      }
      if (high < low) return Bad("a repetition of at least ", low, " and at most ", high);
      if (high == 0) return Bad("a repetition of at most 0; leave it out");
      repeat(low, high);
    } else {
      at_ = at;
      return absl::OkStatus();
    }
    if (At('*') || At('+') || At('?')) return Bad("what is repeated cannot be repeated again; put it into brackets");
    return absl::OkStatus();
  }

  absl::StatusOr<int> Number() {
    SkipBlanks();
    int value = -1;
    for (; at_ < text_.size() && absl::ascii_isdigit(static_cast<unsigned char>(text_[at_])); ++at_)
      value = std::min(std::max(value, 0) * 10 + (text_[at_] - '0'), gbnf::kMaxRepeats + 1);
    if (value < 0) return Bad("a number is missing behind ~");
    if (value > gbnf::kMaxRepeats) return Bad("a repetition of more than ", gbnf::kMaxRepeats);
    return value;
  }

  // ---- all of them ----

  // Lark has no terminal that is in itself.
  absl::Status CheckTerminals() const {
    enum class State : uint8_t { kNew, kOpen, kChecked };
    std::vector<State> states(rules_.size(), State::kNew);
    for (size_t i = 0; i < rules_.size(); ++i)
      if (IsTerminal(rules_[i].name)) DT_RETURN_IF_ERROR(CheckTerminal(static_cast<int>(i), states));
    return absl::OkStatus();
  }
  template <typename State>
  absl::Status CheckTerminal(int i, std::vector<State>& states) const {
    if (states[i] == State::kChecked) return absl::OkStatus();
    if (states[i] == State::kOpen)
      return BadField(param_, "line ", rules_[i].line, ": the terminal ", rules_[i].name, " is in itself");
    states[i] = State::kOpen;
    std::vector<int> inner;
    Collect(rules_[i].alternatives, inner);
    for (const int other : inner) DT_RETURN_IF_ERROR(CheckTerminal(other, states));
    states[i] = State::kChecked;
    return absl::OkStatus();
  }
  static void Collect(const std::vector<Sequence>& alternatives, std::vector<int>& rules) {
    for (const Sequence& sequence : alternatives)
      for (const Part& part : sequence) {
        if (part.rule >= 0) rules.push_back(part.rule);
        Collect(part.alternatives, rules);
      }
  }

  Grammar Finished(int start) {
    if (ignored_ < 0) return {std::move(rules_), start};
    Part any;
    any.alternatives = std::move(rules_[ignored_].alternatives);
    any.min = 0;
    any.max = gbnf::kUnbounded;
    rules_[ignored_].alternatives = {{std::move(any)}};
    rules_.push_back({.name = "start", .alternatives = {{Reference(ignored_), Reference(start)}}, .line = 1});
    const int root = static_cast<int>(rules_.size()) - 1;
    return {std::move(rules_), root};
  }

  const std::string& text_;
  const std::string& param_;
  const gbnf::Spelling spelling_;
  size_t at_ = 0;
  int line_ = 1;
  bool in_terminal_ = false;
  int ignored_ = -1;  // the rule of what %ignore names
  std::vector<Rule> rules_;
  std::vector<int> first_named_;  // the line, by rule
  absl::flat_hash_map<std::string, int> indices_;
};

constexpr std::pair<std::string_view, const char*> kCommon[] = {
    {"DIGIT", "[0-9]"},
    {"HEXDIGIT", "[0-9a-fA-F]"},
    {"INT", "[0-9]+"},
    {"SIGNED_INT", "[+-]?[0-9]+"},
    {"DECIMAL", "[0-9]+\\.[0-9]*|\\.[0-9]+"},
    {"FLOAT", "[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?"},
    {"SIGNED_FLOAT", "[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)"},
    {"NUMBER", "([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?"},
    {"SIGNED_NUMBER", "[+-]?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?"},
    {"ESCAPED_STRING", "\"([^\"\\\\\\n]|\\\\[^\\n])*\""},
    {"LCASE_LETTER", "[a-z]"},
    {"UCASE_LETTER", "[A-Z]"},
    {"LETTER", "[a-zA-Z]"},
    {"WORD", "[a-zA-Z]+"},
    {"CNAME", "[_a-zA-Z][_a-zA-Z0-9]*"},
    {"WS_INLINE", "[ \\t]+"},
    {"WS", "[ \\t\\f\\r\\n]+"},
    {"CR", "\\r"},
    {"LF", "\\n"},
    {"NEWLINE", "(\\r?\\n)+"},
    {"SH_COMMENT", "#[^\\n]*"},
    {"CPP_COMMENT", "//[^\\n]*"},
    {"SQL_COMMENT", "--[^\\n]*"},
    {"C_COMMENT", "/\\*([^*]|\\*+[^*/])*\\*+/"},
};

}  // namespace

const char* CommonTerminal(std::string_view name) {
  for (const auto& [known, pattern] : kCommon)
    if (known == name) return pattern;
  return nullptr;
}

absl::StatusOr<Grammar> ReadGrammar(const std::string& text, const std::string& param, gbnf::Spelling spelling) {
  return Reader(text, param, spelling).Read();
}

}  // namespace dovetail::server::lark
