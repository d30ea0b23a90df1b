#pragma once
#include <span>
#include <string_view>

#include "base/status.h"
#include "server/openai/json.h"

namespace dovetail::server {

enum class Endpoint { kCompletions, kChat };

// A field that clients know from other servers and that would change the answer if it were obeyed. Silence would be a
// wrong answer.
// Threads: plain values and pure functions.
struct UnsupportedField {
  std::string_view name;
  bool completions;           // refused at /v1/completions
  bool chat;                  // refused at /v1/chat/completions
  std::string_view harmless;  // JSON text of a value that asks for nothing; more, separated by '|'. Null always does.
  std::string_view remedy;
};
std::span<const UnsupportedField> UnsupportedFields();

// kInvalidArgument names the first such field of `body` that asks for something.
absl::Status RefuseUnsupported(const Json& body, Endpoint endpoint);

}  // namespace dovetail::server
