#pragma once
#include <memory>

#include "server/openai/block_answer.h"

namespace dovetail::server {

// An answer as the Responses API has it: items of type message, reasoning and function_call; streamed, its events with
// sequence numbers, from response.created to response.completed, .incomplete (the length ended it) or .failed. `spec`
// outlives it; its `repeated` is an object.
// Threads: thread-safe; what it returns is thread-compatible.
std::unique_ptr<BlockAnswer> MakeResponsesAnswer(const ResponseSpec& spec);

}  // namespace dovetail::server
