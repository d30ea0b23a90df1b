#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/chat_body.h"
#include "server/openai/json.h"

namespace dovetail::server {

// The tools of /v1/responses as functions of a chat, and back. A tool of type custom, whose input is any text, is a
// function with the one argument `input`. A function of a namespace has the namespace's name before its own.
// Source: OpenAI's API reference (custom tools, namespaces), as Codex CLI uses them.
// Threads: pure.

// The name that the model sees; `group`: its namespace, may be empty.
std::string ShownName(const std::string& group, const std::string& name);

// Sets `tools` of the chat's body. kInvalidArgument names a tool that is malformed or that a server would have to run.
absl::Status ToolsAsFunctions(const Json& tools, ChatBody& chat);

// Sets `tool_choice` of the chat's body; what is neither a function nor a custom tool is left to the chat's reader.
void ToolChoiceAsFunction(const Json& choice, ChatBody& chat);

// The arguments of a custom tool's call.
Json InputAsArguments(const Json& input);
// The text in such arguments; arguments that are none are the text themselves, as nothing that a model writes is lost.
std::string InputOf(const std::string& arguments);

// What the client calls the function that the model calls `shown`.
struct ClientTool {
  bool custom = false;
  std::string group;  // its namespace, or empty
  std::string name;
};
// `tools`: as the client sent them; may be no array.
ClientTool ClientToolOf(const Json& tools, const std::string& shown);

}  // namespace dovetail::server
