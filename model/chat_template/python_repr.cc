#include "model/chat_template/python_repr.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

absl::Status TooDeep() { return ResourceExhausted("a value is nested too deeply to be printed"); }

void AppendQuoted(std::string_view text, std::string& out) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out.push_back(quote);
  for (size_t at = 0; at < text.size();) {
    const char32_t c = DecodeAt(text, at);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out.push_back('\\');
      out.push_back(static_cast<char>(c));
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out.append(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
    } else if (IsPrintable(c)) {
      AppendUtf8(c, out);
    } else {
      out.append(c < 0x100     ? absl::StrFormat("\\x%02x", static_cast<unsigned>(c))
                 : c < 0x10000 ? absl::StrFormat("\\u%04x", static_cast<unsigned>(c))
                               : absl::StrFormat("\\U%08x", static_cast<unsigned>(c)));
    }
  }
  out.push_back(quote);
}

absl::Status AppendRepr(Runtime& runtime, const Value& value, std::string& out, int depth);

absl::Status AppendItems(Runtime& runtime, const std::vector<Value>& items, std::string& out, int depth) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.append(", ");
    DT_RETURN_IF_ERROR(AppendRepr(runtime, items[i], out, depth + 1));
  }
  return absl::OkStatus();
}

absl::Status AppendRepr(Runtime& runtime, const Value& value, std::string& out, int depth) {
  if (depth > runtime.limits().value_depth) return TooDeep();
  if (out.size() > runtime.string_bytes_max()) return runtime.ChargeString(out.size());
  DT_RETURN_IF_ERROR(runtime.Charge());
  switch (value.kind()) {
    case Kind::kUndefined: out.append("Undefined"); break;
    case Kind::kNone: out.append("None"); break;
    case Kind::kBool: out.append(value.boolean() ? "True" : "False"); break;
    case Kind::kInt: absl::StrAppend(&out, value.integer()); break;
    case Kind::kDouble: out.append(FloatRepr(value.number())); break;
    case Kind::kString:
      DT_RETURN_IF_ERROR(runtime.Charge(value.text().size() / 16));
      AppendQuoted(value.view(), out);
      break;
    case Kind::kList: {
      const List& list = value.list();
      out.push_back(list.is_tuple ? '(' : '[');
      DT_RETURN_IF_ERROR(AppendItems(runtime, list.items, out, depth));
      if (list.is_tuple && list.items.size() == 1) out.push_back(',');
      out.push_back(list.is_tuple ? ')' : ']');
      break;
    }
    case Kind::kDict: {
      out.push_back('{');
      bool first = true;
      for (const auto& [key, item] : value.dict().entries()) {
        if (!std::exchange(first, false)) out.append(", ");
        DT_RETURN_IF_ERROR(AppendRepr(runtime, key, out, depth + 1));
        out.append(": ");
        DT_RETURN_IF_ERROR(AppendRepr(runtime, item, out, depth + 1));
      }
      out.push_back('}');
      break;
    }
    case Kind::kNamespace: {
      out.append("<Namespace {");
      bool first = true;
      for (const auto& [key, item] : value.space().attributes) {
        if (!std::exchange(first, false)) out.append(", ");
        AppendQuoted(key, out);
        out.append(": ");
        DT_RETURN_IF_ERROR(AppendRepr(runtime, item, out, depth + 1));
      }
      out.append("}>");
      break;
    }
    case Kind::kCallable:
      absl::StrAppend(&out, value.callable().macro ? "<Macro '" : "<function '", value.callable().name, "'>");
      break;
    case Kind::kLoop:
      absl::StrAppend(&out, "<LoopContext ", value.loop().index0 + 1, "/", value.loop().length, ">");
      break;
  }
  return absl::OkStatus();
}

}  // namespace

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string scientific(buffer, end);
  const size_t e = scientific.find('e');
  const int exponent = std::atoi(scientific.c_str() + e + 1);
  if (exponent < -4 || exponent >= 16) return scientific;  // 1e+16, 1.5e-07: two digits of exponent, as in Python
  const auto fixed_end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed).ptr;
  std::string fixed(buffer, fixed_end);
  if (fixed.find('.') == std::string::npos) fixed.append(".0");
  return fixed;
}

absl::StatusOr<bool> ContainsInput(Runtime& runtime, const Value& value, int depth) {
  if (depth > runtime.limits().value_depth) return TooDeep();
  DT_RETURN_IF_ERROR(runtime.Charge());
  const auto any = [&](const Value& item) { return ContainsInput(runtime, item, depth + 1); };
  switch (value.kind()) {
    case Kind::kString: return value.text().HasInput();
    case Kind::kList:
      for (const Value& item : value.list().items) {
        DT_ASSIGN_OR_RETURN(const bool found, any(item));
        if (found) return true;
      }
      return false;
    case Kind::kDict:
      for (const auto& [key, item] : value.dict().entries()) {
        if (key.IsString() && key.text().HasInput()) return true;
        DT_ASSIGN_OR_RETURN(const bool found, any(item));
        if (found) return true;
      }
      return false;
    case Kind::kNamespace:
      for (const auto& [key, item] : value.space().attributes) {
        DT_ASSIGN_OR_RETURN(const bool found, any(item));
        if (found) return true;
      }
      return false;
    default: return false;
  }
}

absl::StatusOr<Text> ToRepr(Runtime& runtime, const Value& value) {
  std::string out;
  DT_RETURN_IF_ERROR(AppendRepr(runtime, value, out, 0));
  DT_RETURN_IF_ERROR(runtime.ChargeString(out.size()));
  DT_ASSIGN_OR_RETURN(const bool is_input, ContainsInput(runtime, value));
  return Text(std::move(out), is_input);
}

absl::StatusOr<Text> ToText(Runtime& runtime, const Value& value) {
  if (value.IsUndefined()) return Text();
  if (!value.IsString()) return ToRepr(runtime, value);
  DT_RETURN_IF_ERROR(runtime.ChargeBytes(value.text().Cost()));
  return value.text();
}

}  // namespace dovetail::model::jinja
