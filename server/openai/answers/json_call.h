#pragma once
#include "server/openai/answers/call_syntax.h"

namespace dovetail::server {

// A call as a JSON object: {"name": ..., "arguments": {...}}, or "parameters"; other keys are passed over.

// Reads one after the other, each in two parts.
// Threads: thread-compatible; a value.
class JsonCallReader {
 public:
  // From before its opening brace to before the arguments' or, where they do not come last, behind its closing one.
  void Head(Cursor& cursor, CallHead& head);
  // What is left of it behind the arguments, the closing brace included.
  void Tail(Cursor& cursor) const;

 private:
  bool closed_ = false;  // by its head
};

}  // namespace dovetail::server
