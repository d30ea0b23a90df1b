#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "requests/generation.h"
#include "server/openai/prepare.h"
#include "server/openai/response_spec.h"

// The answers of the APIs that are made of blocks (block_answer.h), for their tests.

namespace dovetail::server::test {

// A thought, text and a call, as the model writes them.
inline constexpr char kThoughtTextAndCall[] =
    "<think>\nHm.</think>\nLooking.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";

// The prompt of a request as text, or what is wrong with the request.
std::string PromptOf(const ServedModel& model, const absl::StatusOr<PreparedGeneration>& prepared);

// Whether `status` is about this field, and begins with its name.
void ExpectAbout(const std::string& param, const absl::Status& status);

// `spec` with a prompt of three tokens, hermes' calls and thoughts.
ResponseSpec WithBlocks(ResponseSpec spec, bool stream);

// The events of a streamed answer whose text comes in pieces of so many bytes, and ends for `reason`.
std::vector<Json> EventsOf(const ResponseSpec& spec, std::string_view text, size_t piece,
                           requests::FinishReason reason);

// The body of an answer that is not streamed.
Json BodyOf(const ResponseSpec& spec, std::string_view text, requests::FinishReason reason);

}  // namespace dovetail::server::test
