#include "model/chat_template/lexer.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out.push_back(source[i]);
      continue;
    }
    out.push_back('\n');
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool IsDigitByte(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}
bool IsNameByte(char c) { return IsNameStart(c) || IsDigitByte(c); }

std::string_view StripRight(std::string_view text) {
  while (!text.empty()) {
    size_t start = PreviousOffset(text, text.size());
    size_t at = start;
    if (!IsSpace(DecodeAt(text, at))) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

bool IsAllSpace(std::string_view text) { return StripRight(text).empty(); }

class Lexer {
 public:
  explicit Lexer(std::string source) : storage_(std::move(source)), source_(storage_) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (at_ < source_.size()) {
      const size_t tag = FindTag();
      if (tag == std::string_view::npos) {
        Emit(TokenType::kText, std::string(source_.substr(at_)));
        AdvanceTo(source_.size());
        break;
      }
      DT_RETURN_IF_ERROR(LexTag(tag));
    }
    Emit(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  char Peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }
  bool StartsWith(std::string_view text) const { return source_.substr(at_).starts_with(text); }

  void AdvanceTo(size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + at_, source_.begin() + to, '\n'));
    line_starting_ = to > at_ ? source_[to - 1] == '\n' : line_starting_;
    at_ = to;
  }

  void Emit(TokenType type, std::string text) {
    if (type == TokenType::kText && text.empty()) return;
    tokens_.push_back({type, line_, std::move(text)});
  }

  size_t FindTag() const {
    for (size_t i = at_; (i = source_.find('{', i)) != std::string_view::npos; ++i) {
      if (i + 1 < source_.size() && std::strchr("{%#", source_[i + 1])) return i;
    }
    return std::string_view::npos;
  }

  void SkipSpace() {
    size_t to = at_;
    while (to < source_.size()) {
      size_t next = to;
      if (!IsSpace(DecodeAt(source_, next))) break;
      to = next;
    }
    AdvanceTo(to);
  }

  // What remains of the text before a tag once the tag's sign, or lstrip_blocks, has had its way.
  std::string_view TrimmedBefore(std::string_view text, char sign, bool is_variable) const {
    if (sign == '-') return StripRight(text);
    if (sign == '+' || is_variable) return text;
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
    if (line_begin == 0 && !line_starting_) return text;
    return IsAllSpace(text.substr(line_begin)) ? text.substr(0, line_begin) : text;
  }

  absl::Status LexTag(size_t tag) {
    const char kind = source_[tag + 1];
    const char sign =
        tag + 2 < source_.size() && (source_[tag + 2] == '-' || source_[tag + 2] == '+') ? source_[tag + 2] : 0;
    const std::string_view text = TrimmedBefore(source_.substr(at_, tag - at_), sign, kind == '{');
    Emit(TokenType::kText, std::string(text));
    AdvanceTo(tag);
    const int opened = line_;
    const size_t body = tag + (sign ? 3 : 2);
    if (kind == '#') return SkipComment(tag + 2, opened);
    AdvanceTo(body);
    if (kind == '%') {
      if (TakeWordTag("raw")) return LexRaw(opened);
      Emit(TokenType::kBlockBegin, "");
      return LexExpression("%}", TokenType::kBlockEnd, opened);
    }
    Emit(TokenType::kVariableBegin, "");
    return LexExpression("}}", TokenType::kVariableEnd, opened);
  }

  // Consumes the end of a tag, `end` at at_ (after an optional sign), and the white space that it eats.
  void FinishTag(char sign, std::string_view end, bool trim_newline) {
    AdvanceTo(at_ + (sign ? 1 : 0) + end.size());
    if (sign == '-') {
      SkipSpace();
    } else if (sign != '+' && trim_newline && Peek() == '\n') {
      AdvanceTo(at_ + 1);
    }
  }

  absl::Status SkipComment(size_t from, int opened) {
    const size_t end = source_.find("#}", from);
    if (end == std::string_view::npos) return SyntaxError(opened, "missing end of comment tag");
    const bool has_sign = end > from && (source_[end - 1] == '-' || source_[end - 1] == '+');
    const char sign = has_sign ? source_[end - 1] : 0;
    AdvanceTo(end - (has_sign ? 1 : 0));
    FinishTag(sign, "#}", /*trim_newline=*/true);
    return absl::OkStatus();
  }

  // Takes ` word %}` if that is what follows, else leaves the position alone.
  bool TakeWordTag(std::string_view word) {
    size_t i = at_;
    const auto skip = [&] {
      while (i < source_.size() && IsSpace(static_cast<unsigned char>(source_[i]))) ++i;
    };
    skip();
    if (!source_.substr(i).starts_with(word)) return false;
    i += word.size();
    skip();
    const char sign = i < source_.size() && source_[i] == '-' ? '-' : 0;
    if (!source_.substr(i + (sign ? 1 : 0)).starts_with("%}")) return false;
    AdvanceTo(i);
    FinishTag(sign, "%}", /*trim_newline=*/false);
    return true;
  }

  absl::Status LexRaw(int opened) {
    for (size_t i = at_; (i = source_.find("{%", i)) != std::string_view::npos; i += 2) {
      size_t word = i + 2;
      const char begin_sign =
          word < source_.size() && (source_[word] == '-' || source_[word] == '+') ? source_[word++] : 0;
      while (word < source_.size() && IsSpace(static_cast<unsigned char>(source_[word]))) ++word;
      if (!source_.substr(word).starts_with("endraw")) continue;
      word += 6;
      while (word < source_.size() && IsSpace(static_cast<unsigned char>(source_[word]))) ++word;
      const char end_sign = word < source_.size() && (source_[word] == '-' || source_[word] == '+') ? source_[word] : 0;
      if (!source_.substr(word + (end_sign ? 1 : 0)).starts_with("%}")) continue;
      Emit(TokenType::kText, std::string(TrimmedBefore(source_.substr(at_, i - at_), begin_sign, false)));
      AdvanceTo(word);
      FinishTag(end_sign, "%}", /*trim_newline=*/true);
      return absl::OkStatus();
    }
    return SyntaxError(opened, "missing end of raw directive");
  }

  absl::Status LexExpression(std::string_view end, TokenType end_type, int opened) {
    std::string open_brackets;
    while (true) {
      SkipSpace();
      if (at_ >= source_.size()) return SyntaxError(opened, "a tag is not closed before the end of the template");
      if (open_brackets.empty()) {
        const char sign = (Peek() == '-' || (Peek() == '+' && end == "%}")) ? Peek() : 0;
        if (source_.substr(at_ + (sign ? 1 : 0)).starts_with(end)) {
          Emit(end_type, "");
          FinishTag(sign, end, /*trim_newline=*/end == "%}");
          return absl::OkStatus();
        }
      }
      DT_RETURN_IF_ERROR(LexToken(open_brackets));
    }
  }

  absl::Status LexToken(std::string& open_brackets) {
    const char c = Peek();
    if (IsNameStart(c)) {
      size_t to = at_;
      while (to < source_.size() && IsNameByte(source_[to])) ++to;
      Emit(TokenType::kName, std::string(source_.substr(at_, to - at_)));
      AdvanceTo(to);
      return absl::OkStatus();
    }
    if (IsDigitByte(c)) return LexNumber();
    if (c == '"' || c == '\'') return LexString(c);
    for (std::string_view two : {"//", "**", "==", "!=", "<=", ">="}) {
      if (StartsWith(two)) return TakeOperator(two);
    }
    if (!std::strchr("+-*/%~|.,:=<>()[]{};", c) || c == '\0') {
      return SyntaxError(line_, "unexpected character '" + std::string(1, c) + "'");
    }
    if (std::strchr("([{", c)) open_brackets.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (std::strchr(")]}", c)) {
      if (open_brackets.empty()) return SyntaxError(line_, "unexpected '" + std::string(1, c) + "'");
      if (open_brackets.back() != c) {
        return SyntaxError(line_, "unexpected '" + std::string(1, c) + "', expected '" + open_brackets.back() + "'");
      }
      open_brackets.pop_back();
    }
    return TakeOperator(source_.substr(at_, 1));
  }

  absl::Status TakeOperator(std::string_view text) {
    Emit(TokenType::kOperator, std::string(text));
    AdvanceTo(at_ + text.size());
    return absl::OkStatus();
  }

  absl::Status LexNumber() {
    size_t to = at_;
    bool is_float = false;
    int base = 10;
    if (Peek() == '0' && std::strchr("xXoObB", Peek(1)) && Peek(1) != '\0') {
      base = (Peek(1) | 0x20) == 'x' ? 16 : (Peek(1) | 0x20) == 'o' ? 8 : 2;
      to += 2;
      while (to < source_.size() && (std::isxdigit(static_cast<unsigned char>(source_[to])) || source_[to] == '_'))
        ++to;
    } else {
      const auto digits = [&] {
        while (to < source_.size() && (IsDigitByte(source_[to]) || source_[to] == '_')) ++to;
      };
      const auto at = [&](size_t i) { return i < source_.size() ? source_[i] : '\0'; };
      digits();
      if (at(to) == '.' && IsDigitByte(at(to + 1))) {
        is_float = true;
        ++to;
        digits();
      }
      const size_t sign = at(to + 1) == '+' || at(to + 1) == '-' ? 1 : 0;
      if ((at(to) == 'e' || at(to) == 'E') && IsDigitByte(at(to + 1 + sign))) {
        is_float = true;
        to += 1 + sign;
        digits();
      }
    }
    std::string text(source_.substr(at_, to - at_));
    text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
    Token token{is_float ? TokenType::kFloat : TokenType::kInteger, line_, text};
    const char* begin = text.data() + (base == 10 ? 0 : 2);
    const char* end = text.data() + text.size();
    const auto parsed =
        is_float ? std::from_chars(begin, end, token.number) : std::from_chars(begin, end, token.integer, base);
    if (parsed.ec != std::errc() || parsed.ptr != end)
      return SyntaxError(line_, "the number " + text + " is out of range");
    tokens_.push_back(std::move(token));
    AdvanceTo(to);
    return absl::OkStatus();
  }

  absl::Status LexString(char quote) {
    const int opened = line_;
    std::string out;
    size_t i = at_ + 1;
    while (i < source_.size() && source_[i] != quote) {
      if (source_[i] != '\\') {
        out.push_back(source_[i++]);
      } else {
        if (i + 1 >= source_.size()) break;
        DT_RETURN_IF_ERROR(Unescape(i, out));
      }
    }
    if (i >= source_.size()) return SyntaxError(opened, "a string is not closed before the end of the template");
    Emit(TokenType::kString, std::move(out));
    AdvanceTo(i + 1);
    return absl::OkStatus();
  }

  // One escape sequence of Python's unicode-escape codec at source_[i] == '\\'.
  absl::Status Unescape(size_t& i, std::string& out) {
    const char c = source_[i + 1];
    static constexpr std::string_view kNames = "abfnrtv\\'\"", kValues = "\a\b\f\n\r\t\v\\'\"";
    i += 2;
    if (const size_t simple = kNames.find(c); simple != std::string_view::npos) {
      out.push_back(kValues[simple]);
      return absl::OkStatus();
    }
    if (c == '\n') return absl::OkStatus();
    const size_t hex_digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    const bool octal = c >= '0' && c <= '7';
    if (hex_digits == 0 && !octal) {
      out.push_back('\\');
      out.push_back(c);
      return absl::OkStatus();
    }
    if (octal) --i;
    const char* begin = source_.data() + i;
    const char* end = begin + std::min(octal ? size_t{3} : hex_digits, source_.size() - i);
    uint32_t code = 0;
    const auto parsed = std::from_chars(begin, end, code, octal ? 8 : 16);
    const auto length = static_cast<size_t>(parsed.ptr - begin);
    if (!octal && (length != hex_digits || code > 0x10FFFF)) return SyntaxError(line_, "broken escape in a string");
    AppendUtf8(code, out);
    i += length;
    return absl::OkStatus();
  }

  const std::string storage_;
  const std::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) { return Lexer(NormalizeNewlines(source)).Run(); }

absl::Status SyntaxError(int line, const std::string& what) {
  return InvalidArgument("chat template line ", line, ": ", what);
}

}  // namespace dovetail::model::jinja
