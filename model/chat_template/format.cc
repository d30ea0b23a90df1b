#include "model/chat_template/format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "absl/strings/str_cat.h"
#include "model/chat_template/operators.h"
#include "model/chat_template/python_repr.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

constexpr int kMaxWidth = 4096;
constexpr int kMaxPrecision = 100;

// What both syntaxes say about one field.
struct Spec {
  std::string fill = " ";
  char align = 0;  // < > ^ or 0 for the type's own
  char sign = 0;   // + or space
  bool alternate = false, zero = false, thousands = false;
  int width = 0;
  int precision = -1;
  char type = 0;
};

// Reads decimal digits at `at`. kInvalidArgument above `max`.
absl::StatusOr<int> TakeNumber(std::string_view text, size_t& at, int max) {
  int number = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') {
    number = number * 10 + (text[at++] - '0');
    if (number > max) return ResourceExhausted("a format asks for a width or precision above ", max);
  }
  return number;
}

Text Pad(const Text& body, const Spec& spec, char own_align) {
  const size_t length = CountCodePoints(body.view());
  const auto width = static_cast<size_t>(spec.width);
  if (length >= width) return body;
  const size_t missing = width - length;
  const char align = spec.align ? spec.align : own_align;
  const size_t left = align == '>' ? missing : align == '^' ? missing / 2 : 0;
  Text out;
  for (size_t i = 0; i < left; ++i) out.Append(spec.fill, false);
  out.Append(body);
  for (size_t i = left; i < missing; ++i) out.Append(spec.fill, false);
  return out;
}

std::string GroupThousands(std::string digits) {
  const size_t dot = digits.find_first_not_of("0123456789");
  size_t end = dot == std::string::npos ? digits.size() : dot;
  for (; end > 3; end -= 3) digits.insert(end - 3, ",");
  return digits;
}

std::string IntegerDigits(uint64_t magnitude, char type) {
  const unsigned base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  // Named: g++ 12 with -fsanitize=undefined indexes a conditional string literal wrongly.
  const char* const alphabet = type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
  std::string out;
  do {
    out.push_back(alphabet[magnitude % base]);
    magnitude /= base;
  } while (magnitude > 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string FloatDigits(double magnitude, char type, int precision) {
  char buffer[512];
  const char pattern[] = {'%', '.', '*', type, 0};
  const int length = std::snprintf(buffer, sizeof buffer, pattern, precision < 0 ? 6 : precision, magnitude);
  return std::string(buffer, static_cast<size_t>(std::clamp(length, 0, 511)));
}

absl::StatusOr<Text> FormatNumber(const Value& value, const Spec& spec) {
  if (!value.IsNumber()) {
    if (value.IsUndefined()) return UndefinedError(value);
    return InvalidArgument("format type '", std::string(1, spec.type), "' needs a number, not ", TypeName(value));
  }
  const bool wants_integer = std::string_view("diuxXob").find(spec.type) != std::string_view::npos;
  bool negative;
  std::string digits, prefix;
  if (wants_integer) {
    const double number = value.number();
    if (!value.IsInteger() && !(std::abs(number) < 9e18))
      return InvalidArgument("cannot convert the float to an integer");
    const int64_t integer = value.IsInteger() ? value.integer() : static_cast<int64_t>(number);
    negative = integer < 0;
    digits = IntegerDigits(negative ? 0 - static_cast<uint64_t>(integer) : static_cast<uint64_t>(integer), spec.type);
    if (spec.alternate && (spec.type == 'x' || spec.type == 'X' || spec.type == 'o' || spec.type == 'b')) {
      prefix = std::string("0") + spec.type;
    }
  } else {
    negative = std::signbit(value.number());
    const double magnitude = std::abs(value.number());
    digits = spec.type == '%' ? FloatDigits(magnitude * 100, 'f', spec.precision) + "%"
                              : FloatDigits(magnitude, spec.type, spec.precision);
  }
  if (spec.thousands) digits = GroupThousands(digits);
  prefix.insert(0, negative ? "-" : spec.sign ? std::string(1, spec.sign) : "");
  if (spec.zero && !spec.align) {
    const size_t width = static_cast<size_t>(spec.width);
    if (prefix.size() + digits.size() < width) digits.insert(0, width - prefix.size() - digits.size(), '0');
  }
  return Pad(Text(prefix + digits, false), spec, '>');
}

Text Truncate(const Text& text, int precision) {
  if (precision < 0) return text;
  return text.Slice(0, OffsetOfCodePoint(text.view(), static_cast<size_t>(precision)));
}

absl::StatusOr<Text> FormatPercentField(Runtime& runtime, const Value& value, const Spec& spec) {
  switch (spec.type) {
    case 's': {
      DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, value));
      return Pad(Truncate(text, spec.precision), spec, '>');
    }
    case 'r':
    case 'a': {
      DT_ASSIGN_OR_RETURN(const Text text, ToRepr(runtime, value));
      return Pad(Truncate(text, spec.precision), spec, '>');
    }
    case 'c': {
      if (value.IsString() && CountCodePoints(value.view()) == 1) return Pad(value.text(), spec, '>');
      if (!value.IsInteger() || value.integer() < 0 || value.integer() > 0x10FFFF) {
        return InvalidArgument("%c requires int or char");
      }
      std::string bytes;
      AppendUtf8(static_cast<char32_t>(value.integer()), bytes);
      return Pad(Text(bytes, false), spec, '>');
    }
    default: return FormatNumber(value, spec);
  }
}

// Parses `flags width .precision type` after a '%'.
absl::StatusOr<Spec> ParsePercentSpec(std::string_view text, size_t& at) {
  Spec spec;
  for (; at < text.size() && std::string_view("-+ #0").find(text[at]) != std::string_view::npos; ++at) {
    if (text[at] == '-') spec.align = '<';
    if (text[at] == '+' || (text[at] == ' ' && !spec.sign)) spec.sign = text[at];
    if (text[at] == '#') spec.alternate = true;
    if (text[at] == '0') spec.zero = true;
  }
  DT_ASSIGN_OR_RETURN(spec.width, TakeNumber(text, at, kMaxWidth));
  if (at < text.size() && text[at] == '.') {
    ++at;
    DT_ASSIGN_OR_RETURN(spec.precision, TakeNumber(text, at, kMaxPrecision));
  }
  if (at >= text.size()) return InvalidArgument("incomplete format");
  spec.type = text[at++];
  if (std::string_view("diusrafFeEgGxXoc").find(spec.type) == std::string_view::npos) {
    return InvalidArgument("unsupported format character '", std::string(1, spec.type), "'");
  }
  return spec;
}

bool IsAlign(char c) { return c == '<' || c == '>' || c == '^'; }

absl::StatusOr<Spec> ParseBraceSpec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const size_t first = text.empty() ? 0 : CodePointBytes(static_cast<unsigned char>(text[0]));
  if (first < text.size() && IsAlign(text[first])) {
    spec.fill = std::string(text.substr(0, first));
    at = first;
  }
  if (at < text.size() && IsAlign(text[at])) spec.align = text[at++];
  if (at < text.size() && (text[at] == '+' || text[at] == ' ' || text[at] == '-')) {
    spec.sign = text[at] == '-' ? 0 : text[at];
    ++at;
  }
  if (at < text.size() && text[at] == '#') spec.alternate = at++ < text.size();
  if (at < text.size() && text[at] == '0') spec.zero = at++ < text.size();
  DT_ASSIGN_OR_RETURN(spec.width, TakeNumber(text, at, kMaxWidth));
  if (at < text.size() && text[at] == ',') spec.thousands = at++ < text.size();
  if (at < text.size() && text[at] == '.') {
    ++at;
    DT_ASSIGN_OR_RETURN(spec.precision, TakeNumber(text, at, kMaxPrecision));
  }
  if (at < text.size()) spec.type = text[at++];
  if (at != text.size() || (spec.type && std::string_view("sdbxXoeEfFgG%").find(spec.type) == std::string_view::npos)) {
    return InvalidArgument("unsupported format specifier '", std::string(text.substr(0, 40)), "'");
  }
  return spec;
}

absl::StatusOr<Text> FormatBraceField(Runtime& runtime, const Value& value, std::string_view spec_text) {
  DT_ASSIGN_OR_RETURN(Spec spec, ParseBraceSpec(spec_text));
  if (!spec.type && value.IsNumber() && value.kind() != Kind::kBool) {
    if (value.IsInteger()) {
      spec.type = 'd';
    } else if (spec.precision >= 0) {
      spec.type = 'g';
    } else {
      return Pad(Text(FloatRepr(value.number()), false), spec, '>');
    }
  }
  if (spec.type && spec.type != 's') return FormatNumber(value, spec);
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, value));
  return Pad(Truncate(text, spec.precision), spec, '<');
}

// Follows .attribute and [key] after the first part of a field's name.
absl::StatusOr<Value> FollowPath(Runtime& runtime, Value value, std::string_view path) {
  while (!path.empty()) {
    const bool is_item = path[0] == '[';
    if (!is_item && path[0] != '.') return InvalidArgument("broken field name in a format string");
    const size_t end = is_item ? path.find(']') : path.find_first_of(".[", 1);
    if (is_item && end == std::string_view::npos) return InvalidArgument("missing ']' in a format string");
    const std::string_view name = path.substr(1, end == std::string_view::npos ? end : end - 1);
    const bool is_index = is_item && !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
    if (is_index) {
      size_t at = 0;
      DT_ASSIGN_OR_RETURN(const int index, TakeNumber(name, at, std::numeric_limits<int>::max() / 20));
      DT_ASSIGN_OR_RETURN(value, GetItem(runtime, value, Value(int64_t{index})));
    } else {
      DT_ASSIGN_OR_RETURN(value, GetItem(runtime, value, Value::String(std::string(name))));
    }
    path = end == std::string_view::npos ? std::string_view() : path.substr(end + (is_item ? 1 : 0));
  }
  return value;
}

absl::StatusOr<Value> FieldValue(Runtime& runtime, std::string_view name, const Args& args, int& next_index) {
  const size_t path = std::min(name.find_first_of(".["), name.size());
  const std::string_view root = name.substr(0, path);
  if (!root.empty() && root.find_first_not_of("0123456789") != std::string_view::npos) {
    for (const auto& [key, value] : args.named) {
      if (key == root) return FollowPath(runtime, value, name.substr(path));
    }
    return InvalidArgument("format(): no argument '", std::string(root.substr(0, 40)), "'");
  }
  constexpr int kManual = -1;
  if (root.empty() ? next_index == kManual : next_index > 0) {
    return InvalidArgument("format(): cannot mix manual and automatic field numbering");
  }
  int index = next_index;
  next_index = root.empty() ? next_index + 1 : kManual;
  if (!root.empty()) {
    size_t at = 0;
    DT_ASSIGN_OR_RETURN(index, TakeNumber(root, at, kMaxWidth));
  }
  if (static_cast<size_t>(index) >= args.positional.size()) {
    return InvalidArgument("format(): replacement index ", index, " out of range");
  }
  return FollowPath(runtime, args.positional[static_cast<size_t>(index)], name.substr(path));
}

}  // namespace

absl::StatusOr<Text> FormatPercent(Runtime& runtime, const Text& format, const Value& values) {
  const std::string_view text = format.view();
  const bool is_tuple = values.IsList() && values.list().is_tuple;
  size_t next = 0;
  bool used_name = false;
  Text out;
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(format.Cost()));
  for (size_t at = 0; at < text.size();) {
    const size_t percent = std::min(text.find('%', at), text.size());
    out.Append(format.Slice(at, percent));
    if (percent == text.size()) break;
    at = percent + 1;
    if (at < text.size() && text[at] == '%') {
      out.Append("%", format.IsInputAt(at++));
      continue;
    }
    Value value = values;
    if (at < text.size() && text[at] == '(') {
      const size_t close = text.find(')', at);
      if (close == std::string_view::npos || !values.IsDict()) return InvalidArgument("format requires a mapping");
      DT_ASSIGN_OR_RETURN(value,
                          GetItem(runtime, values, Value::String(std::string(text.substr(at + 1, close - at - 1)))));
      at = close + 1;
      used_name = true;
    } else {
      if (is_tuple ? next >= values.list().items.size() : next > 0) {
        return InvalidArgument("not enough arguments for format string");
      }
      if (is_tuple) value = values.list().items[next];
      ++next;
    }
    DT_ASSIGN_OR_RETURN(const Spec spec, ParsePercentSpec(text, at));
    DT_ASSIGN_OR_RETURN(Text field, FormatPercentField(runtime, value, spec));
    if (format.is_markup()) field = EscapeHtml(field);
    DT_RETURN_IF_ERROR(runtime.ChargeString(out.size() + field.size()));
    out.Append(field);
  }
  const size_t given = is_tuple ? values.list().items.size() : values.IsDict() ? next : 1;
  if (!used_name && next != given) return InvalidArgument("not all arguments converted during string formatting");
  return out;
}

absl::StatusOr<Text> FormatBraces(Runtime& runtime, const Text& format, const Args& args) {
  const std::string_view text = format.view();
  int next_index = 0;
  Text out;
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(format.Cost()));
  for (size_t at = 0; at < text.size();) {
    const size_t brace = std::min(text.find_first_of("{}", at), text.size());
    out.Append(format.Slice(at, brace));
    if (brace == text.size()) break;
    at = brace + 1;
    if (at < text.size() && text[at] == text[brace]) {
      out.Append(format.Slice(at, at + 1));
      ++at;
      continue;
    }
    const size_t close = text.find('}', at);
    if (text[brace] == '}' || close == std::string_view::npos)
      return InvalidArgument("single brace in a format string");
    std::string_view field = text.substr(at, close - at);
    at = close + 1;
    const size_t colon = std::min(field.find(':'), field.size());
    const std::string_view spec = field.substr(std::min(colon + 1, field.size()));
    field = field.substr(0, colon);
    const bool as_repr = field.ends_with("!r");
    if (as_repr || field.ends_with("!s")) field.remove_suffix(2);
    DT_ASSIGN_OR_RETURN(Value value, FieldValue(runtime, field, args, next_index));
    if (as_repr) {
      DT_ASSIGN_OR_RETURN(Text repr, ToRepr(runtime, value));
      DT_ASSIGN_OR_RETURN(value, runtime.NewString(std::move(repr)));
    }
    DT_ASSIGN_OR_RETURN(const Text filled, FormatBraceField(runtime, value, spec));
    DT_RETURN_IF_ERROR(runtime.ChargeString(out.size() + filled.size()));
    out.Append(filled);
  }
  return out;
}

}  // namespace dovetail::model::jinja
