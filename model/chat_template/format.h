#pragma once
#include "model/chat_template/runtime.h"

// Python's two ways to fill a format string.
// Threads: as the Runtime: one thread at a time.

namespace dovetail::model::jinja {

// format % values: values is a tuple, a dict for %(name)s, or the single value. Conversions d i u s r a f F e g x X o c
// and %, with flags, width and precision.
// Errors: kInvalidArgument with Python's text; kResourceExhausted for a result beyond the limits.
absl::StatusOr<Text> FormatPercent(Runtime& runtime, const Text& format, const Value& values);

// format.format(*args): {}, {0}, {name}, {0.attribute}, {0[key]}, !r and !s, and specs
// [[fill]align][sign][0][width][,][.precision][type].
absl::StatusOr<Text> FormatBraces(Runtime& runtime, const Text& format, const Args& args);

}  // namespace dovetail::model::jinja
