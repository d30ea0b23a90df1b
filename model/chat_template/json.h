#pragma once
#include <string>

#include "model/chat_template/runtime.h"
#include "nlohmann/json.hpp"

namespace dovetail::model::jinja {

// Arguments of Python's json.dumps that templates use.
struct JsonFormat {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool pretty = false;  // one item a line
  std::string indent;   // one level, when pretty
  std::string item_separator = ", ", key_separator = ": ";
};

// json.dumps(value): key order kept, nothing escaped for HTML. Input if anything in `value` is.
// Errors: kInvalidArgument for what JSON cannot hold (undefined, functions).
// Threads: as the Runtime: one thread at a time.
absl::StatusOr<Text> ToJson(Runtime& runtime, const Value& value, const JsonFormat& format);

// JSON as a template value whose strings carry `is_input`. Charged one step a container.
// Errors: kInvalidArgument for invalid UTF-8, kResourceExhausted beyond limits.value_depth.
// Threads: as the Runtime: one thread at a time.
absl::StatusOr<Value> FromJson(Runtime& runtime, const nlohmann::ordered_json& json, bool is_input);

}  // namespace dovetail::model::jinja
