#pragma once
#include "server/openai/field_reader.h"
#include "server/openai/requests.h"
#include "server/openai/unsupported_fields.h"

namespace dovetail::server {

// The fields that /v1/completions and /v1/chat/completions share. `logprobs` differs between the two and is left to the
// caller.
// Errors: carry the field (api_error.h).
// Threads: pure.
absl::StatusOr<GenerationFields> ParseGenerationFields(const FieldReader& reader, const ServedModel& model,
                                                       Endpoint endpoint);

// The name in `model`, or NotFound. Where there is none, the first of the one model that is served.
absl::StatusOr<std::string> ParseModelName(const FieldReader& reader, const ServedModel& model);

absl::Status RequireObject(const Json& body);

}  // namespace dovetail::server
