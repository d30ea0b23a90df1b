#pragma once
#include <memory>
#include <string>

#include "requests/generation.h"
#include "server/openai/requests.h"
#include "server/openai/response_spec.h"
#include "server/openai/shaped_answer.h"

namespace dovetail::server {

// llama-server's own API: /completion (and /completions), /infill, /apply-template, /props and /slots. Requests become
// completions; fields that they share with /v1/completions mean what they mean there. Errors carry the field
// (api_error.h).
// Threads: pure, except that an answer's timings are read from the clock.

// The body of /completion: one prompt, as text, token ids or both mixed.
absl::StatusOr<CompletionRequest> ParseLlamaRequest(const Json& body, const ServedModel& model);

// The body of /infill: the text between input_prefix and input_suffix. kInvalidArgument where the model has no tokens
// for it.
absl::StatusOr<CompletionRequest> ParseInfillRequest(const Json& body, const ServedModel& model);

// generation_settings: what a request is run with.
Json LlamaSettings(const GenerationFields& fields, const requests::GenerationRequest& request);

// `spec` and `model` outlive it. spec.repeated has `settings` (LlamaSettings), `return_tokens` and `timings_per_token`.
std::unique_ptr<ShapedAnswer> MakeLlamaAnswer(const ResponseSpec& spec, const ServedModel& model);

// The body of an answer to /apply-template.
absl::StatusOr<std::string> ApplyTemplateBody(const TokenizeRequest& request, const ServedModel& model);

// /props. `usable_len`: of a sequence now.
std::string PropsBody(const ServedModel& model, int64_t usable_len, const std::string& version);

// /slots: a slot for each sequence that may run, the first `running` of them busy.
std::string SlotsBody(const ServedModel& model, int64_t usable_len, int running);

}  // namespace dovetail::server
