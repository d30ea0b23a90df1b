#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

// Chat templates of our own for models that bring none: `--chat-template chatml`, or chosen by the special tokens of
// the vocabulary. Each accepts text content as a string or as a list of {"type": "text", "text": ...} parts, and
// refuses other parts.
// Threads: pure.

namespace dovetail::model {

// chatml, llama3, gemma, mistral, llama2, zephyr, phi3.
std::vector<std::string> BuiltinTemplateNames();

// The Jinja source.
// Errors: kNotFound listing the names.
absl::StatusOr<std::string> BuiltinTemplate(std::string_view name);

// The name of the template whose special tokens the vocabulary has: `has_token` says whether a text is one special
// token. nullopt when none fits; then a conversation cannot be rendered and the caller must ask for a template.
std::optional<std::string> BuiltinTemplateFor(const std::function<bool(std::string_view)>& has_token);

}  // namespace dovetail::model
