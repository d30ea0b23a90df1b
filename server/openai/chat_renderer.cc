#include "server/openai/chat_renderer.h"

#include <memory>

#include "absl/time/clock.h"
#include "model/chat_template/chat_template.h"

namespace dovetail::server {

absl::StatusOr<ChatRenderer> MakeChatRenderer(std::string_view template_source, std::string bos_token,
                                              std::string eos_token) {
  DT_ASSIGN_OR_RETURN(auto parsed, model::ChatTemplate::Parse(template_source));
  return ChatRenderer([chat = std::move(parsed), bos = std::move(bos_token), eos = std::move(eos_token)](
                          const ChatPrompt& prompt) -> absl::StatusOr<std::vector<model::PromptPart>> {
    model::RenderInputs inputs;
    inputs.messages = prompt.messages;
    inputs.add_generation_prompt = prompt.add_generation_prompt;
    inputs.continue_final_message = prompt.continue_final_message;
    inputs.bos_token = bos;
    inputs.eos_token = eos;
    inputs.extra = prompt.template_kwargs;
    inputs.now = absl::Now();
    inputs.time_zone = absl::LocalTimeZone();
    DT_ASSIGN_OR_RETURN(auto rendered, chat.Render(inputs));
    return std::move(rendered.parts);
  });
}

}  // namespace dovetail::server
