#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "server/openai/answers/call_formats.h"
#include "server/openai/json.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

inline constexpr size_t kMaxTools = 128;

// What the answer to a chat may call.
// Threads: plain values and pure functions.
struct ToolUse {
  std::vector<Tool> tools;  // empty: nothing
  bool parallel = true;     // else the answer ends with its first call
  bool required = false;    // it is calls and nothing else
  Json grammar;             // those calls, where they are enforced (CallFormat); else null
  std::string param;        // the field that asks for that

  bool any() const { return !tools.empty(); }
};

// `tools`, `tool_choice` and `parallel_tool_calls` of a body. Sets `shown` to what the chat template gets (null: no
// tools). kInvalidArgument names the field: what is malformed, tools of one name, a choice that is not among them, or
// parameters that are to be enforced and cannot be. Those are enforced with a choice of "required" or a function, and
// with `strict`; `strict: false` asks for any object. A tool's `format` is a grammar of its one argument `input`, which
// is always enforced. `with_format`: the answer may also be something that is enforced, so that calls are, too.
absl::StatusOr<ToolUse> ParseTools(const Json& body, const ServedModel& model, bool with_format, Json& shown);

// `tool_calls` of a message at `path`, as templates get them: arguments as objects where they are. Adds each id to
// `ids`, with its function's name.
absl::StatusOr<Json> ParseHistoricCalls(const Json& value, const std::string& path,
                                        std::vector<std::pair<std::string, std::string>>& ids);

}  // namespace dovetail::server
