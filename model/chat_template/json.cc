#include "model/chat_template/json.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/chat_template/python_repr.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

std::string JsonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return FloatRepr(value);
}

class Writer {
 public:
  Writer(Runtime& runtime, const JsonFormat& format) : runtime_(runtime), format_(format) {}

  absl::Status Write(const Value& value, int depth) {
    if (depth > runtime_.limits().value_depth) return ResourceExhausted("tojson: a value is nested too deeply");
    if (out_.size() > runtime_.string_bytes_max()) return runtime_.ChargeString(out_.size());
    DT_RETURN_IF_ERROR(runtime_.Charge());
    switch (value.kind()) {
      case Kind::kNone: out_.append("null"); return absl::OkStatus();
      case Kind::kBool: out_.append(value.boolean() ? "true" : "false"); return absl::OkStatus();
      case Kind::kInt: absl::StrAppend(&out_, value.integer()); return absl::OkStatus();
      case Kind::kDouble: out_.append(JsonFloat(value.number())); return absl::OkStatus();
      case Kind::kString: return WriteString(value.view());
      case Kind::kList: return WriteList(value.list(), depth);
      case Kind::kDict: return WriteDict(value.dict(), depth);
      default: return InvalidArgument("Object of type ", TypeName(value), " is not JSON serializable");
    }
  }

  std::string Take() { return std::move(out_); }

 private:
  void NewLine(int depth) {
    if (!format_.pretty) return;
    out_.push_back('\n');
    for (int i = 0; i < depth; ++i) out_.append(format_.indent);
  }

  absl::Status WriteString(std::string_view text) {
    DT_RETURN_IF_ERROR(runtime_.Charge(text.size() / 16));
    out_.push_back('"');
    size_t plain = 0;  // start of the bytes not yet copied
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const auto byte = static_cast<unsigned char>(text[at]);
      if (byte < 0x80 ? byte >= 0x20 && byte != '"' && byte != '\\' && (byte != 0x7F || !format_.ensure_ascii)
                      : !format_.ensure_ascii) {
        ++at;
        continue;
      }
      out_.append(text.substr(plain, begin - plain));
      WriteEscaped(DecodeAt(text, at));
      plain = at;
    }
    out_.append(text.substr(plain));
    out_.push_back('"');
    return absl::OkStatus();
  }

  void WriteEscaped(char32_t c) {
    static constexpr std::string_view kNames = "\"\\bfnrt", kValues = "\"\\\b\f\n\r\t";
    const size_t simple = c < 0x80 ? kValues.find(static_cast<char>(c)) : std::string_view::npos;
    if (simple != std::string_view::npos) {
      out_.push_back('\\');
      out_.push_back(kNames[simple]);
    } else if (c == 0x7F) {
      out_.push_back('\x7F');
    } else if (c < 0x10000) {
      absl::StrAppendFormat(&out_, "\\u%04x", static_cast<unsigned>(c));
    } else {
      const unsigned rest = static_cast<unsigned>(c) - 0x10000;
      absl::StrAppendFormat(&out_, "\\u%04x\\u%04x", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
    }
  }

  absl::Status WriteList(const List& list, int depth) {
    if (list.items.empty()) {
      out_.append("[]");
      return absl::OkStatus();
    }
    out_.push_back('[');
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out_.append(format_.item_separator);
      NewLine(depth + 1);
      DT_RETURN_IF_ERROR(Write(list.items[i], depth + 1));
    }
    NewLine(depth);
    out_.push_back(']');
    return absl::OkStatus();
  }

  absl::Status WriteDict(const Dict& dict, int depth) {
    if (dict.size() == 0) {
      out_.append("{}");
      return absl::OkStatus();
    }
    std::vector<const Dict::Entry*> entries;
    for (const auto& entry : dict.entries()) entries.push_back(&entry);
    if (format_.sort_keys) {
      const auto is_string = [](const auto* entry) { return entry->first.IsString(); };
      if (!std::all_of(entries.begin(), entries.end(), is_string)) {
        return InvalidArgument("tojson: sort_keys needs keys that are strings");
      }
      DT_RETURN_IF_ERROR(runtime_.Charge(entries.size() * 16));
      std::stable_sort(entries.begin(), entries.end(),
                       [](const auto* a, const auto* b) { return a->first.view() < b->first.view(); });
    }
    out_.push_back('{');
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out_.append(format_.item_separator);
      NewLine(depth + 1);
      DT_RETURN_IF_ERROR(WriteKey(entries[i]->first));
      out_.append(format_.key_separator);
      DT_RETURN_IF_ERROR(Write(entries[i]->second, depth + 1));
    }
    NewLine(depth);
    out_.push_back('}');
    return absl::OkStatus();
  }

  // A key that is no string is written as the string of its JSON.
  absl::Status WriteKey(const Value& key) {
    if (key.IsString()) return WriteString(key.view());
    out_.push_back('"');
    DT_RETURN_IF_ERROR(Write(key, 0));
    out_.push_back('"');
    return absl::OkStatus();
  }

  Runtime& runtime_;
  const JsonFormat& format_;
  std::string out_;
};

absl::StatusOr<Value> Convert(Runtime& runtime, const nlohmann::ordered_json& json, bool is_input, int depth);

absl::StatusOr<Value> ConvertString(const std::string& text, bool is_input) {
  if (!IsValidUtf8(text)) return InvalidArgument("a string of the conversation is not valid UTF-8");
  return Value::String(text, is_input);
}

absl::StatusOr<Value> ConvertObject(Runtime& runtime, const nlohmann::ordered_json& json, bool is_input, int depth) {
  DT_ASSIGN_OR_RETURN(Dict * dict, runtime.NewDict());
  for (const auto& [name, item] : json.items()) {
    DT_ASSIGN_OR_RETURN(Value key, ConvertString(name, is_input));
    DT_ASSIGN_OR_RETURN(Value value, Convert(runtime, item, is_input, depth + 1));
    dict->Set(std::move(key), std::move(value));
  }
  return Value(dict);
}

absl::StatusOr<Value> Convert(Runtime& runtime, const nlohmann::ordered_json& json, bool is_input, int depth) {
  if (depth > runtime.limits().value_depth) {
    return ResourceExhausted("the conversation's JSON is nested deeper than ", runtime.limits().value_depth, " levels");
  }
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::boolean: return Value(json.get<bool>());
    case nlohmann::ordered_json::value_t::number_integer: return Value(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_unsigned: {
      const auto number = json.get<uint64_t>();
      if (number > static_cast<uint64_t>(INT64_MAX)) return Value(static_cast<double>(number));
      return Value(static_cast<int64_t>(number));
    }
    case nlohmann::ordered_json::value_t::number_float: return Value(json.get<double>());
    case nlohmann::ordered_json::value_t::string: return ConvertString(json.get_ref<const std::string&>(), is_input);
    case nlohmann::ordered_json::value_t::array: {
      DT_ASSIGN_OR_RETURN(List * list, runtime.NewList());
      for (const auto& item : json) {
        DT_ASSIGN_OR_RETURN(Value value, Convert(runtime, item, is_input, depth + 1));
        list->items.push_back(std::move(value));
      }
      return Value(list);
    }
    case nlohmann::ordered_json::value_t::object: return ConvertObject(runtime, json, is_input, depth);
    default: return Value(None{});
  }
}

}  // namespace

absl::StatusOr<Text> ToJson(Runtime& runtime, const Value& value, const JsonFormat& format) {
  if (value.IsUndefined()) return UndefinedError(value);
  Writer writer(runtime, format);
  DT_RETURN_IF_ERROR(writer.Write(value, 0));
  std::string out = writer.Take();
  DT_RETURN_IF_ERROR(runtime.ChargeString(out.size()));
  DT_ASSIGN_OR_RETURN(const bool is_input, ContainsInput(runtime, value));
  return Text(std::move(out), is_input);
}

absl::StatusOr<Value> FromJson(Runtime& runtime, const nlohmann::ordered_json& json, bool is_input) {
  return Convert(runtime, json, is_input, 0);
}

}  // namespace dovetail::model::jinja
