#include "server/openai/answers/call_formats.h"

#include <array>

namespace dovetail::server {
namespace {

std::array<const CallFormat*, 12> All() {
  return {&HermesFormat(),       &Llama3JsonFormat(), &PythonicFormat(),   &MistralFormat(),
          &MistralArrayFormat(), &Qwen3CoderFormat(), &GraniteFormat(),    &MinimaxM2Format(),
          &KimiK2Format(),       &OpenAiFormat(),     &DeepSeekV3Format(), &DeepSeekV31Format()};
}

}  // namespace

const CallFormat* FindCallFormat(std::string_view name) {
  for (const CallFormat* format : All())
    if (format->name == name) return format;
  return nullptr;
}

std::vector<std::string> CallFormatNames() {
  std::vector<std::string> names;
  for (const CallFormat* format : All()) names.emplace_back(format->name);
  return names;
}

const CallFormat* CallFormatOf(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (has("<|channel|>") && has("<|call|>")) return &OpenAiFormat();
  if (has("<|tool_calls_section_begin|>")) return &KimiK2Format();
  if (has("<minimax:tool_call>")) return &MinimaxM2Format();
  if (has("<｜tool▁calls▁begin｜>")) return has("```json") ? &DeepSeekV3Format() : &DeepSeekV31Format();
  if (has("[TOOL_CALLS]")) return has("[ARGS]") ? &MistralFormat() : &MistralArrayFormat();
  if (has("<function=")) return has("<parameter=") && !has("<seed:tool_call>") ? &Qwen3CoderFormat() : nullptr;
  if (has("<|tool_call|>")) return &GraniteFormat();
  if (has("<tool_call>") && has("arguments") && !has("<arg_key>")) return &HermesFormat();
  if (has("<|tool_list_start|>") || has("<|python_start|>") || has("List of tools: ")) return &PythonicFormat();
  if (has("<|start_header_id|>") && (has("<|python_tag|>") || has("\"parameters\""))) return &Llama3JsonFormat();
  return nullptr;
}

}  // namespace dovetail::server
