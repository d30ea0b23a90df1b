#pragma once
#include "base/cancel_token.h"
#include "base/status.h"
#include "proto/sampling_params.h"
#include "server/openai/requests.h"

namespace dovetail::server {

inline constexpr size_t kMaxGuidedChoices = 1000;

// Fills in fields.grammar from the one field of `body` that says what the text may be, if one does: response_format,
// structured_outputs {json, json_object, regex, choice, grammar, structural_tag}, guided_json, guided_regex,
// guided_choice, guided_grammar, json_schema, grammar. kInvalidArgument: two of them, one that cannot be enforced
// (json_schema.h, regex_check.h, gbnf.h, structural_tag.h), or a field that contradicts it (ignore_eos, min_tokens).
// Compiling is left to ChooseGrammar.
absl::Status ParseStructuredOutput(const Json& body, const ServedModel& model, GenerationFields& fields);

// What contradicts a grammar, which the field `param` asks for: min_tokens, ignore_eos, a model without text.
absl::Status CheckGrammarFields(const GenerationFields& fields, const std::string& param, const ServedModel& model);

// Whether ChooseGrammar would compile, which takes seconds at times.
// Threads: thread-safe.
bool CompilesGrammar(const std::string& grammar, const ServedModel& model);

// Compiles the grammar, unless it is empty, so that workers are not given one that they could not follow.
// kInvalidArgument names `param`. kCancelled: `cancel`, if there is one, says so.
// Threads: thread-safe; blocks for up to seconds where it compiles.
absl::Status ChooseGrammar(const std::string& grammar, const std::string& param, const ServedModel& model,
                           const CancelToken* cancel, proto::SamplingParams& sampling);

}  // namespace dovetail::server
