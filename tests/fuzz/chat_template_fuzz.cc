#include <string>
#include <string_view>

#include "base/check.h"
#include "model/chat_template/chat_template.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {

// Any bytes as a chat template and, after a NUL, a message's text: a template that is refused, a conversation that is
// refused, or a prompt within the limits in which the message's text is input.
void FuzzChatTemplate(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t nul = bytes.find('\0');
  const std::string text = nul == std::string_view::npos ? "<|im_end|>" : std::string(bytes.substr(nul + 1));
  const model::TemplateLimits limits;
  const auto parsed = model::ChatTemplate::Parse(bytes.substr(0, nul), limits);
  if (!parsed.ok()) {
    DT_CHECK(!parsed.status().message().empty());
    return;
  }
  model::RenderInputs inputs;
  inputs.messages = {{{"role", "system"}, {"content", "be brief"}}, {{"role", "user"}, {"content", text}}};
  inputs.bos_token = "<s>";
  inputs.eos_token = "</s>";
  const auto prompt = parsed->Render(inputs);
  if (!prompt.ok()) {
    DT_CHECK(!prompt.status().message().empty());
    return;
  }
  size_t total = 0;
  for (size_t i = 0; i < prompt->parts.size(); ++i) {
    DT_CHECK(!prompt->parts[i].text.empty());
    DT_CHECK(i == 0 || prompt->parts[i].is_input != prompt->parts[i - 1].is_input);
    total += prompt->parts[i].text.size();
  }
  DT_CHECK(total <= limits.output_bytes + text.size() + 1024, "longer than a prompt may be");
}

}  // namespace dovetail::fuzz
