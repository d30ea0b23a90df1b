#pragma once
#include <string>

#include "model/chat_template/runtime.h"

// Python's str() and repr() of template values.
// Threads: as the Runtime: one thread at a time.

namespace dovetail::model::jinja {

// Shortest digits that read back as the same number, Python's spelling: 1.0, 1e+16, inf, nan.
std::string FloatRepr(double value);

// str(value): what `{{ value }}` prints. A string keeps its flags; the text of a container is input if anything in it
// is.
absl::StatusOr<Text> ToText(Runtime& runtime, const Value& value);
absl::StatusOr<Text> ToRepr(Runtime& runtime, const Value& value);

// Whether any string inside `value` has input in it.
absl::StatusOr<bool> ContainsInput(Runtime& runtime, const Value& value, int depth = 0);

}  // namespace dovetail::model::jinja
