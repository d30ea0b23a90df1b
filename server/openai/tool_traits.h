#pragma once
#include "model/chat_template/chat_template.h"
#include "server/openai/json.h"

namespace dovetail::server {

// What a chat template does with tools. A value.
struct ToolTraits {
  bool shows_tools = false;
  bool shows_calls = false;     // and results
  bool text_arguments = false;  // of a call: as a string of JSON, else as an object
  bool null_content = false;    // of a message with calls and no text: null, else ""
  bool takes_system = true;
  bool takes_thinking = false;  // gpt-oss: thoughts before a call are called so
};

// By rendering conversations with it. `inputs`: its tokens.
ToolTraits TraitsOf(const model::ChatTemplate& chat, const model::RenderInputs& inputs, std::string_view source);

// The conversation as such a template can show it: `inputs` has its messages and tools, which are changed.
void Adapt(const ToolTraits& traits, model::RenderInputs& inputs);

}  // namespace dovetail::server
