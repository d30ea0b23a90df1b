#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/requests.h"
#include "server/openai/served_model.h"

// Bodies of the routes that do not generate, as JSON text. Pure. Errors carry the field (api_error.h).

namespace dovetail::server {

std::string ModelsBody(const ServedModel& model);                                             // GET /v1/models
absl::StatusOr<std::string> ModelBody(const ServedModel& model,
                                      const std::string& name);  // GET /v1/models/{name}; NotFound
absl::StatusOr<std::string> TokenizerInfoBody(const ServedModel& model);                      // GET /tokenizer_info

// The union of what vLLM and llama.cpp answer: {count, max_model_len, tokens, token_strs} and tokens as pieces if asked
// for.
absl::StatusOr<std::string> TokenizeBody(const TokenizeRequest& request, const ServedModel& model);
// {"prompt": text, "content": text}
std::string DetokenizeBody(const DetokenizeRequest& request, const ServedModel& model);

}  // namespace dovetail::server
