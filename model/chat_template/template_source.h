#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

// Which chat template a model brings. A folder has chat_template.jinja (which wins), or "chat_template" in
// tokenizer_config.json or chat_template.json; a GGUF file has the string tokenizer.chat_template and perhaps
// tokenizer.chat_template.<name>.
// Threads: plain values and pure functions.

namespace dovetail::model {

struct NamedTemplate {
  std::string name;  // "default" for a template without a name
  std::string source;
};

struct TemplateSources {
  std::vector<NamedTemplate> templates;
  // As the file spells them; absent when it says nothing or null.
  std::optional<std::string> bos_token, eos_token;

  bool empty() const { return templates.empty(); }
  // Adds a template, replacing one of the same name.
  void Set(std::string name, std::string source);
};

// Reads "chat_template" (a string, a list of {name, template}, or an object of name to template), "bos_token" and
// "eos_token" (strings, or objects with "content") of a tokenizer_config.json's text. A file without a template gives
// none.
// Errors: kInvalidArgument naming the field.
absl::StatusOr<TemplateSources> ReadTokenizerConfigTemplates(std::string_view json);

// The template for a request: tool_use when it has tools and there is one, else default, else the only one.
// Errors: kNotFound when there is none, or several and none of them is the default.
absl::StatusOr<std::string> SelectTemplate(const TemplateSources& sources, bool has_tools);

}  // namespace dovetail::model
