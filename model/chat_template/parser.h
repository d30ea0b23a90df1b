#pragma once
#include <string_view>

#include "base/status.h"
#include "model/chat_template/ast.h"
#include "model/chat_template/limits.h"

namespace dovetail::model::jinja {

// Parses a template (grammar of Jinja 3.1 without blocks, inheritance, include, import and recursive loops; with loop
// controls).
// Errors: kInvalidArgument naming the line; kResourceExhausted for a template beyond `limits`.
// Threads: pure.
absl::StatusOr<Ast> ParseTemplate(std::string_view source, const TemplateLimits& limits);

}  // namespace dovetail::model::jinja
