#pragma once
#include <cstdint>
#include <string>

#include "base/status.h"
#include "server/openai/requests.h"
#include "server/openai/served_model.h"

// Bodies of the routes that do not generate, as JSON text. Errors carry the field (api_error.h). `usable_len` is
// ServedModel::UsableLength() now: they give it as max_model_len.
// Threads: pure.

namespace dovetail::server {

// GET /v1/models, /v1/models/{name} (NotFound). Where usable_len is less than --max-model-len and the model allow,
// configured_max_model_len gives that.
std::string ModelsBody(const ServedModel& model, int64_t usable_len);
absl::StatusOr<std::string> ModelBody(const ServedModel& model, const std::string& name, int64_t usable_len);
absl::StatusOr<std::string> TokenizerInfoBody(const ServedModel& model);  // GET /tokenizer_info

// The union of what vLLM and llama.cpp answer: {count, max_model_len, tokens, token_strs} and tokens as pieces if asked
// for.
absl::StatusOr<std::string> TokenizeBody(const TokenizeRequest& request, const ServedModel& model, int64_t usable_len);
// {"input_tokens": the length of the conversation as the model gets it}
absl::StatusOr<std::string> CountTokensBody(const ChatRequest& request, const ServedModel& model);
// {"prompt": text, "content": text}
std::string DetokenizeBody(const DetokenizeRequest& request, const ServedModel& model);

}  // namespace dovetail::server
