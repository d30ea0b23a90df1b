#pragma once
#include <string>

#include "server/openai/choice.h"
#include "server/openai/json.h"
#include "server/openai/usage_totals.h"

namespace dovetail::server {

// How an answer ended.
struct AnswerEnd {
  std::string finish_reason;  // of its choice (choice.h)
  Json stop_reason;           // of its choice
  UsageTotals usage;
};

// How far a prompt is, as llama-server tells it.
struct PromptProgress {
  int64_t total = 0, cached = 0, processed = 0;  // tokens; `processed` counts cached ones
  double time_ms = 0;                            // since the request was taken

  Json AsJson() const { return {{"total", total}, {"cache", cached}, {"processed", processed}, {"time_ms", time_ms}}; }
};

// The one answer to a request in the shape of an API other than OpenAI's completions: deltas of a choice in, SSE frames
// or a JSON body out. A state machine.
// Threads: thread-compatible.
class ShapedAnswer {
 public:
  virtual ~ShapedAnswer() = default;

  // These return the frames to send now; nothing where the answer is not streamed.
  virtual std::string Add(const Choice::Delta& delta) = 0;
  // Of the prompt, so many tokens are read. A request that asks for it only (GenerationFields::return_progress).
  virtual std::string Progress(const PromptProgress&) { return ""; }
  virtual std::string Finish(const AnswerEnd& end) = 0;
  virtual std::string Fail(const absl::Status& why) = 0;

  virtual Json Body() const = 0;  // after Finish
};

}  // namespace dovetail::server
