#include <algorithm>

#include "model/chat_template/builtins.h"
#include "model/chat_template/format.h"
#include "model/chat_template/json.h"
#include "model/chat_template/python_repr.h"
#include "model/chat_template/text_ops.h"
#include "model/chat_template/unicode.h"

// Filters whose result is a string, and JSON.

namespace dovetail::model::jinja {
namespace {

using Result = absl::StatusOr<Value>;

template <std::string (*map)(std::string_view)>
Result CaseFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("upper", args, {}).status());
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_RETURN_IF_ERROR(runtime.Charge(text.Cost() / 8));
  return runtime.NewString(MapRuns(text, map));
}

template <Text (*map)(const Text&)>
Result TextFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("title", args, {}).status());
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_RETURN_IF_ERROR(runtime.Charge(text.Cost() / 4));
  return runtime.NewString(map(text));
}

Result TrimFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("trim", args, {"chars"}));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  if (!bound[0] || bound[0]->IsNone()) return runtime.NewString(Strip(text, Side::kBoth));
  if (!bound[0]->IsString()) return TypeError(*bound[0], "cannot be the characters to trim");
  const std::string_view characters = bound[0]->view();
  DT_RETURN_IF_ERROR(runtime.Charge(1 + (text.size() + 4 * characters.size()) / 16));
  return runtime.NewString(Strip(text, Side::kBoth, &characters));
}

Result StringFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("string", args, {}).status());
  if (self.IsString()) return self;
  DT_ASSIGN_OR_RETURN(Text text, ToText(runtime, self));
  return runtime.NewString(std::move(text));
}

Result SafeFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("safe", args, {}).status());
  DT_ASSIGN_OR_RETURN(Text text, ToText(runtime, self));
  text.set_markup(true);
  return runtime.NewString(std::move(text));
}

Result PrettyFilter(Runtime& runtime, const Value& self, const Args&) {
  DT_ASSIGN_OR_RETURN(Text text, ToRepr(runtime, self));
  return runtime.NewString(std::move(text));
}

Result ReplaceFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("replace", args, {"old", "new", "count"}, 2));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_ASSIGN_OR_RETURN(const Text from, ToText(runtime, *bound[0]));
  DT_ASSIGN_OR_RETURN(const Text to, ToText(runtime, *bound[1]));
  const bool unlimited = !bound[2] || bound[2]->IsNone();
  DT_ASSIGN_OR_RETURN(const int64_t limit, unlimited ? absl::StatusOr<int64_t>(-1) : bound.Integer(2, -1));
  DT_ASSIGN_OR_RETURN(Text out, Replace(runtime, text, from.view(), to, limit));
  return runtime.NewString(std::move(out));
}

Result EscapeFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("escape", args, {}).status());
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_RETURN_IF_ERROR(runtime.Charge(text.Cost() / 8));
  return runtime.NewString(EscapeHtml(text));
}

Result IndentFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("indent", args, {"width", "first", "blank"}));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  Text indent;
  if (bound[0] && bound[0]->IsString()) {
    indent = bound[0]->text();
  } else {
    DT_ASSIGN_OR_RETURN(const int64_t width, bound.Integer(0, 4));
    DT_ASSIGN_OR_RETURN(indent, PadTo(runtime, Text(), width, " ", true, false));
  }
  const bool first = bound.Truthy(1, false), blank = bound.Truthy(2, false);
  DT_ASSIGN_OR_RETURN(const std::vector<Text> lines, SplitLines(runtime, text, /*keep_ends=*/true));
  Text out;
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool is_blank = lines[i].view() == "\n" || lines[i].view() == "\r\n";
    if (i == 0 ? first : blank || !is_blank) {
      DT_RETURN_IF_ERROR(runtime.ChargeBytes(indent.Cost()));
      if (out.size() + indent.size() > runtime.string_bytes_max())
        return runtime.ChargeString(out.size() + indent.size());
      out.Append(indent);
    }
    out.Append(lines[i]);
  }
  return runtime.NewString(std::move(out));
}

Result FormatFilter(Runtime& runtime, const Value& self, const Args& args) {
  if (!args.named.empty() && !args.positional.empty()) {
    return InvalidArgument("can't handle positional and keyword arguments at the same time");
  }
  DT_ASSIGN_OR_RETURN(const Text format, ToText(runtime, self));
  Value values;
  if (!args.named.empty()) {
    DT_ASSIGN_OR_RETURN(Dict * dict, runtime.NewDict());
    for (const auto& [name, value] : args.named) DT_RETURN_IF_ERROR(runtime.Insert(*dict, Value::String(name), value));
    values = Value(dict);
  } else {
    DT_ASSIGN_OR_RETURN(List * tuple, runtime.NewList(args.positional.size(), /*is_tuple=*/true));
    tuple->items = args.positional;
    values = Value(tuple);
  }
  DT_ASSIGN_OR_RETURN(Text text, FormatPercent(runtime, format, values));
  return runtime.NewString(std::move(text));
}

Result CenterFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("center", args, {"width"}));
  DT_ASSIGN_OR_RETURN(const int64_t width, bound.Integer(0, 80));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_ASSIGN_OR_RETURN(Text out, PadTo(runtime, text, width, " ", true, true));
  return runtime.NewString(std::move(out));
}

Result TruncateFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_ASSIGN_OR_RETURN(const auto bound, BoundArgs::Bind("truncate", args, {"length", "killwords", "end", "leeway"}));
  DT_ASSIGN_OR_RETURN(const int64_t length, bound.Integer(0, 255));
  DT_ASSIGN_OR_RETURN(const int64_t leeway, bound.Integer(3, 5));
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  Text end("...", false);
  if (bound[2]) {
    DT_ASSIGN_OR_RETURN(end, ToText(runtime, *bound[2]));
  }
  const auto end_length = static_cast<int64_t>(CountCodePoints(end.view()));
  if (length < end_length) return InvalidArgument("truncate: expected length >= ", end_length, ", got ", length);
  if (leeway < 0) return InvalidArgument("truncate: expected leeway >= 0, got ", leeway);
  const auto have = static_cast<int64_t>(CountCodePoints(text.view()));
  if (have <= length || have - length <= leeway) return runtime.NewString(text);
  Text out = text.Slice(0, OffsetOfCodePoint(text.view(), static_cast<size_t>(length - end_length)));
  if (!bound.Truthy(1, false)) {
    const size_t space = out.view().rfind(' ');
    if (space != std::string_view::npos) out = out.Slice(0, space);
  }
  out.Append(end);
  return runtime.NewString(std::move(out));
}

Result WordCountFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("wordcount", args, {}).status());
  DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, self));
  DT_ASSIGN_OR_RETURN(const std::vector<Text> words, Split(runtime, text, nullptr, -1));
  return Value(static_cast<int64_t>(words.size()));
}

// The indent argument of json.dumps: a number of spaces or the indentation itself.
absl::Status ReadIndent(const BoundArgs& bound, size_t i, JsonFormat& format) {
  if (!bound[i] || bound[i]->IsNone()) return absl::OkStatus();
  format.pretty = true;
  format.item_separator = ",";
  if (bound[i]->IsString()) {
    format.indent = std::string(bound[i]->view());
  } else {
    DT_ASSIGN_OR_RETURN(const int64_t width, bound.Integer(i, 0));
    format.indent.assign(static_cast<size_t>(std::clamp<int64_t>(width, 0, 64)), ' ');
  }
  if (format.indent.size() > 64) return ResourceExhausted("tojson: the indentation is longer than 64 bytes");
  return absl::OkStatus();
}

Result ToJsonFilter(Runtime& runtime, const Value& self, const Args& args) {
  // The order of transformers' tojson.
  DT_ASSIGN_OR_RETURN(const auto bound,
                      BoundArgs::Bind("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"}));
  JsonFormat format;
  // Jinja's own tojson takes the indentation first; ensure_ascii is a bool in every template that passes it.
  const bool indent_first = bound[0] && bound[0]->kind() == Kind::kInt;
  format.ensure_ascii = !indent_first && bound.Truthy(0, false);
  DT_RETURN_IF_ERROR(ReadIndent(bound, indent_first ? 0 : 1, format));
  format.sort_keys = bound.Truthy(3, false);
  if (bound[2] && !bound[2]->IsNone()) {
    const bool is_pair = bound[2]->IsList() && bound[2]->list().items.size() == 2 &&
                         bound[2]->list().items[0].IsString() && bound[2]->list().items[1].IsString();
    if (!is_pair) return InvalidArgument("tojson: separators must be a pair of strings");
    format.item_separator = std::string(bound[2]->list().items[0].view());
    format.key_separator = std::string(bound[2]->list().items[1].view());
    if (format.item_separator.size() + format.key_separator.size() > 64) {
      return ResourceExhausted("tojson: the separators are longer than 64 bytes");
    }
  }
  DT_ASSIGN_OR_RETURN(Text text, ToJson(runtime, self, format));
  return runtime.NewString(std::move(text));
}

Result FromJsonFilter(Runtime& runtime, const Value& self, const Args& args) {
  DT_RETURN_IF_ERROR(BoundArgs::Bind("from_json", args, {}).status());
  if (!self.IsString()) return TypeError(self, "cannot be read as JSON: it is not a str");
  DT_RETURN_IF_ERROR(runtime.Charge(1 + self.text().size()));
  const auto json = nlohmann::ordered_json::parse(self.view(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return InvalidArgument("from_json: the string is not valid JSON");
  return FromJson(runtime, json, self.text().HasInput());
}

struct Entry {
  std::string_view name;
  Filter filter;
};

constexpr Entry kFilters[] = {
    {"capitalize", TextFilter<Capitalize>},
    {"center", CenterFilter},
    {"e", EscapeFilter},
    {"escape", EscapeFilter},
    {"format", FormatFilter},
    {"from_json", FromJsonFilter},
    {"fromjson", FromJsonFilter},
    {"indent", IndentFilter},
    {"lower", CaseFilter<ToLower>},
    {"pprint", PrettyFilter},
    {"replace", ReplaceFilter},
    {"safe", SafeFilter},
    {"string", StringFilter},
    {"title", TextFilter<Title>},
    {"tojson", ToJsonFilter},
    {"trim", TrimFilter},
    {"truncate", TruncateFilter},
    {"upper", CaseFilter<ToUpper>},
    {"wordcount", WordCountFilter},
};

}  // namespace

Filter FindTextFilter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.filter;
  }
  return nullptr;
}

}  // namespace dovetail::model::jinja
