#pragma once
#include "model/chat_template/chat_template.h"
#include "server/openai/json.h"

namespace dovetail::server {

// What a chat template does with tools, and with what the system says.
// Threads: plain values and pure functions.
struct ToolTraits {
  bool shows_tools = false;
  bool shows_calls = false;     // and results
  bool text_arguments = false;  // of a call: as a string of JSON, else as an object
  bool null_content = false;    // of a message with calls and no text: null, else ""
  bool takes_system = true;
  bool takes_more_systems = true;  // a second one, also behind what the user said
  bool takes_thinking = false;     // gpt-oss: thoughts before a call are called so
};

// By rendering conversations with it. `inputs`: its tokens.
ToolTraits TraitsOf(const model::ChatTemplate& chat, const model::RenderInputs& inputs, std::string_view source);

// Where the template takes one system message alone, at the beginning: those at the beginning as one, and each later
// one as a part of what the user said before it, or says behind it. Clients of coding agents send such messages.
void AdaptSystem(const ToolTraits& traits, Json& messages);

// The conversation as such a template can show it: `inputs` has its messages and tools, which are changed.
void Adapt(const ToolTraits& traits, model::RenderInputs& inputs);

}  // namespace dovetail::server
