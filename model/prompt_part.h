#pragma once
#include <string>

namespace dovetail::model {

// A stretch of a prompt: what the chat template hands to the tokenizer. `is_input`: it came from the conversation (a
// message, a tool, a template argument) or was derived from it, and never yields a control token, whatever it spells;
// otherwise the template wrote it.
// Threads: thread-compatible; a value.
struct PromptPart {
  std::string text;
  bool is_input = true;
};

}  // namespace dovetail::model
