#pragma once
#include "server/openai/answers/call_syntax.h"

namespace dovetail::server {

// A call as a JSON object: {"name": ..., "arguments": {...}}, or "parameters"; other keys are passed over.

// From before its opening brace to before the arguments' or, where they do not come last, behind its closing one.
void ReadJsonCallHead(Cursor& cursor, CallHead& head);
// What follows the arguments in it, the closing brace included.
void ReadJsonCallTail(Cursor& cursor);

}  // namespace dovetail::server
