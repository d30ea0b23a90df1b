#include "model/chat_template/builtin_templates.h"

#include "absl/strings/str_cat.h"

namespace dovetail::model {
namespace {

// text(content): the text of a message. Stands before every template.
constexpr char kPrelude[] = R"({%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is sequence and content is not mapping -%}
{%- for part in content -%}
{%- if part.type != 'text' -%}
{{- raise_exception('only text content is supported by this chat template, got ' ~ part.type) -}}
{%- endif -%}
{{- part.text -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
)";

// For formats without a system turn: the system text goes in front of the first user message, and roles must alternate.
constexpr char kSplitSystem[] = R"({%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set system = text(messages[0].content) | trim -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role != ('user' if loop.index0 is even else 'assistant') -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- endfor -%}
)";

constexpr char kChatMl[] = R"({%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + text(message.content) + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
)";

constexpr char kLlama3[] = R"({{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + text(message.content) | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
)";

constexpr char kGemma[] = R"({{- bos_token -}}
{%- for message in turns -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{%- if loop.first and system -%}
{{- system + '\n\n' -}}
{%- endif -%}
{{- text(message.content) | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\n' -}}
{%- endif -%}
)";

constexpr char kMistral[] = R"({{- bos_token -}}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- '[INST] ' + (system + '\n\n' if loop.first and system else '') + text(message.content) + '[/INST]' -}}
{%- else -%}
{{- ' ' + text(message.content) | trim + eos_token -}}
{%- endif -%}
{%- endfor -%}
)";

constexpr char kLlama2[] = R"({%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- bos_token + '[INST] ' -}}
{%- if loop.first and system -%}
{{- '<<SYS>>\n' + system + '\n<</SYS>>\n\n' -}}
{%- endif -%}
{{- text(message.content) | trim + ' [/INST]' -}}
{%- else -%}
{{- ' ' + text(message.content) | trim + ' ' + eos_token -}}
{%- endif -%}
{%- endfor -%}
)";

// Roles are part of special tokens here, so they are spelled out: text from the conversation never becomes one.
constexpr char kRoleTokens[] = R"({%- macro role_token(role) -%}
{%- if role == 'system' -%}
{{- '<|system|>\n' -}}
{%- elif role == 'user' -%}
{{- '<|user|>\n' -}}
{%- elif role == 'assistant' -%}
{{- '<|assistant|>\n' -}}
{%- else -%}
{{- raise_exception('unknown role ' ~ role) -}}
{%- endif -%}
{%- endmacro -%}
)";

constexpr char kZephyr[] = R"({%- for message in messages -%}
{{- role_token(message.role) + text(message.content) + eos_token + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- role_token('assistant') -}}
{%- endif -%}
)";

constexpr char kPhi3[] = R"({%- for message in messages -%}
{{- role_token(message.role) + text(message.content) + '<|end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- role_token('assistant') -}}
{%- endif -%}
)";

struct Builtin {
  std::string_view name;
  const char* source;
  const char* helpers;
  // Special tokens that all must be in the vocabulary; empty: never chosen by itself.
  std::vector<std::string_view> markers;
};

// In the order of detection: the more particular first.
std::vector<Builtin> Builtins() {
  return {
      {"chatml", kChatMl, "", {"<|im_start|>", "<|im_end|>"}},
      {"llama3", kLlama3, "", {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}},
      {"gemma", kGemma, kSplitSystem, {"<start_of_turn>", "<end_of_turn>"}},
      {"mistral", kMistral, kSplitSystem, {"[INST]", "[/INST]"}},
      {"phi3", kPhi3, kRoleTokens, {"<|user|>", "<|assistant|>", "<|end|>"}},
      {"zephyr", kZephyr, kRoleTokens, {"<|user|>", "<|assistant|>"}},
      {"llama2", kLlama2, kSplitSystem, {}},
  };
}

}  // namespace

std::vector<std::string> BuiltinTemplateNames() {
  std::vector<std::string> names;
  for (const Builtin& builtin : Builtins()) names.emplace_back(builtin.name);
  return names;
}

absl::StatusOr<std::string> BuiltinTemplate(std::string_view name) {
  std::string known;
  for (const Builtin& builtin : Builtins()) {
    if (builtin.name == name) return absl::StrCat(kPrelude, builtin.helpers, builtin.source);
    absl::StrAppend(&known, known.empty() ? "" : ", ", std::string(builtin.name));
  }
  return NotFound("no built-in chat template '", std::string(name), "'; there are ", known);
}

std::optional<std::string> BuiltinTemplateFor(const std::function<bool(std::string_view)>& has_token) {
  for (const Builtin& builtin : Builtins()) {
    bool all = !builtin.markers.empty();
    for (std::string_view marker : builtin.markers) all = all && has_token(marker);
    if (all) return std::string(builtin.name);
  }
  return std::nullopt;
}

}  // namespace dovetail::model
