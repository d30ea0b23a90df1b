#pragma once
#include <memory>
#include <string>

#include "server/openai/api_error.h"
#include "server/openai/block_answer.h"

namespace dovetail::server {

// An answer as the Messages API has it: blocks of type text, thinking and tool_use; streamed, its events from
// message_start to message_stop, or to an error. A call's arguments that are no JSON object are, in a body, those of an
// object with the one field "arguments". `spec` outlives it.
std::unique_ptr<BlockAnswer> MakeMessagesAnswer(const ResponseSpec& spec);

// The API's envelope, {"type": "error", "error": {type, message}}, as JSON.
// Threads: pure.
std::string MessagesErrorBody(const ApiError& error);

}  // namespace dovetail::server
