#include "server/openai/chat_renderer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "model/chat_template/chat_template.h"
#include "server/openai/tool_traits.h"

namespace dovetail::server {
namespace {

struct Rendered {
  model::ChatTemplate chat;
  ToolTraits traits;
};

model::RenderInputs TokensOf(const ChatTemplateText& text) {
  model::RenderInputs tokens;
  tokens.bos_token = text.bos_token;
  tokens.eos_token = text.eos_token;
  return tokens;
}

absl::StatusOr<Rendered> Read(const std::string& source, const model::RenderInputs& tokens) {
  DT_ASSIGN_OR_RETURN(auto chat, model::ChatTemplate::Parse(source));
  const ToolTraits traits = TraitsOf(chat, tokens, source);
  return Rendered{std::move(chat), traits};
}

const std::string& SourceWithTools(const ChatTemplateText& text) {
  return text.tool_source.empty() ? text.source : text.tool_source;
}

bool HasTools(const ChatPrompt& prompt) {
  return prompt.tools.is_array() || std::any_of(prompt.messages.begin(), prompt.messages.end(), [](const Json& one) {
           return one.contains("tool_calls") || one["role"] == "tool";
         });
}

}  // namespace

const CallFormat* CallsUnder(const ChatTemplateText& text) {
  const auto read = Read(SourceWithTools(text), TokensOf(text));
  if (read.ok() && !read->traits.shows_tools) return &HermesFormat();
  return CallFormatOf(SourceWithTools(text));
}

const ThoughtFormat* ThoughtsUnder(const ChatTemplateText& text) { return ThoughtFormatOf(SourceWithTools(text)); }

absl::StatusOr<ChatRenderer> MakeChatRenderer(const ChatTemplateText& text) {
  const model::RenderInputs tokens = TokensOf(text);
  DT_ASSIGN_OR_RETURN(const Rendered plain, Read(text.source, tokens));
  DT_ASSIGN_OR_RETURN(const Rendered tools, Read(SourceWithTools(text), tokens));
  using Parts = std::vector<model::PromptPart>;
  return ChatRenderer([plain, tools, tokens](const ChatPrompt& prompt) -> absl::StatusOr<Parts> {
    model::RenderInputs inputs = tokens;
    inputs.messages = prompt.messages;
    inputs.tools = prompt.tools;
    inputs.add_generation_prompt = prompt.add_generation_prompt;
    inputs.continue_final_message = prompt.continue_final_message;
    inputs.extra = prompt.template_kwargs;
    inputs.now = absl::Now();
    inputs.time_zone = absl::LocalTimeZone();
    const bool with_tools = HasTools(prompt);
    const Rendered& chosen = with_tools ? tools : plain;
    AdaptSystem(chosen.traits, inputs.messages);
    if (with_tools) Adapt(chosen.traits, inputs);
    DT_ASSIGN_OR_RETURN(auto rendered, chosen.chat.Render(inputs));
    return std::move(rendered.parts);
  });
}

}  // namespace dovetail::server
