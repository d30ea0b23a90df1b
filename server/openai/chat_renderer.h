#pragma once
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

struct ChatTemplateText {
  std::string source;                // which came with the model or from --chat-template
  std::string tool_source;           // for conversations with tools; empty: the same
  std::string bos_token, eos_token;  // what it may write
};

// A ChatRenderer that runs a chat template. kInvalidArgument or kResourceExhausted if the template itself is bad. The
// result owns all it needs.
//
// Templates differ in what they take for a call's arguments and its empty content; a few conversations, rendered
// beforehand, tell. Where a template shows no tools, the system message describes them, in hermes' format; where it
// shows no calls and results, they are text of the assistant's and the user's messages.
// Threads: pure; the renderer that it returns is thread-safe.
absl::StatusOr<ChatRenderer> MakeChatRenderer(const ChatTemplateText& text);

// How the answers of a model with this template spell calls and mark thoughts. Tools that the template does not show
// are called as they are described: in hermes' format.
const CallFormat* CallsUnder(const ChatTemplateText& text);
const ThoughtFormat* ThoughtsUnder(const ChatTemplateText& text);

}  // namespace dovetail::server
