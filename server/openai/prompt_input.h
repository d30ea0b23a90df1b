#pragma once
#include <string>
#include <vector>

#include "server/openai/field_reader.h"
#include "server/openai/requests.h"

namespace dovetail::server {

// The prompts in `field`: a text, texts, token ids, or lists of them.
// Returns: at least one, none empty
// Errors: kInvalidArgument with the path (api_error.h): absent, empty, of another type, more than `most`, a token
//   outside the vocabulary, text for a model without a tokenizer
// Threads: pure
absl::StatusOr<std::vector<PromptInput>> ParsePromptInputs(const FieldReader& reader, const std::string& field,
                                                           size_t most, const ServedModel& model);

}  // namespace dovetail::server
