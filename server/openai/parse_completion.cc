#include "server/openai/parse_generation.h"
#include "server/openai/prompt_input.h"
#include "server/openai/structured_output.h"

namespace dovetail::server {
namespace {

absl::Status ParseBestOf(const FieldReader& reader, GenerationFields& fields) {
  DT_ASSIGN_OR_RETURN(const auto best_of, reader.Int("best_of"));
  if (!best_of) return absl::OkStatus();
  if (*best_of < fields.n) return BadField("best_of", *best_of, " is less than n, which is ", fields.n);
  if (*best_of > fields.n && fields.stream)
    return BadField("best_of", "choosing the best of ", *best_of, " needs all of them first; set stream to false");
  fields.best_of = static_cast<int>(*best_of);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CompletionRequest> ParseCompletionRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const FieldReader reader(body);
  CompletionRequest request;
  DT_RETURN_IF_ERROR(RefuseUnsupported(body, Endpoint::kCompletions));
  DT_ASSIGN_OR_RETURN(request.fields, ParseGenerationFields(reader, model, Endpoint::kCompletions));
  DT_RETURN_IF_ERROR(ParseStructuredOutput(body, model, request.fields));
  DT_ASSIGN_OR_RETURN(const auto logprobs, reader.Int("logprobs"));
  request.fields.logprobs = static_cast<int>(logprobs.value_or(-1));
  DT_ASSIGN_OR_RETURN(request.fields.echo, reader.Bool("echo", false));
  if (request.fields.max_tokens == 0 && !request.fields.echo)
    return BadField("max_tokens", "0 asks for nothing; only with echo does it make sense");
  DT_RETURN_IF_ERROR(ParseBestOf(reader, request.fields));
  DT_ASSIGN_OR_RETURN(request.prompts, ParsePromptInputs(reader, "prompt", kMaxPrompts, model));
  return request;
}

}  // namespace dovetail::server
