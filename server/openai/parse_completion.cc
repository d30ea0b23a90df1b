#include "server/openai/parse_generation.h"
#include "server/openai/structured_output.h"

namespace dovetail::server {
namespace {

// One prompt of text, or of token ids.
absl::StatusOr<PromptInput> ParsePrompt(const Json& value, const std::string& path, const ServedModel& model) {
  if (value.is_string()) {
    if (value.get_ref<const std::string&>().empty()) return BadField(path, "is empty");
    if (model.tokenizer == nullptr) return BadField(path, "this model has no tokenizer; send token ids");
    return PromptInput(value.get_ref<const std::string&>());
  }
  if (!value.is_array()) return BadField(path, "must be a string or an array of token ids, not ", Describe(value));
  if (value.empty()) return BadField(path, "is empty");
  std::vector<TokenId> ids;
  ids.reserve(value.size());
  for (const Json& element : value) {
    DT_ASSIGN_OR_RETURN(const TokenId id, ToTokenId(element, absl::StrCat(path, ".", ids.size()), model.vocab_size));
    ids.push_back(id);
  }
  return PromptInput(std::move(ids));
}

absl::StatusOr<std::vector<PromptInput>> ParsePrompts(const FieldReader& reader, const ServedModel& model) {
  const Json* value = reader.Find("prompt");
  if (value == nullptr)
    return BadField("prompt", "is required: a string, an array of strings, token ids, or arrays of token ids");
  std::vector<PromptInput> prompts;
  const bool several =
      value->is_array() && !value->empty() && (value->front().is_string() || value->front().is_array());
  if (!several) {
    DT_ASSIGN_OR_RETURN(prompts.emplace_back(), ParsePrompt(*value, "prompt", model));
    return prompts;
  }
  if (value->size() > kMaxPrompts)
    return BadField("prompt", value->size(), " prompts; at most ", kMaxPrompts, " are allowed in one request");
  for (const Json& one : *value) {
    const std::string path = absl::StrCat("prompt.", prompts.size());
    DT_ASSIGN_OR_RETURN(prompts.emplace_back(), ParsePrompt(one, path, model));
  }
  return prompts;
}

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
  DT_ASSIGN_OR_RETURN(request.prompts, ParsePrompts(reader, model));
  return request;
}

}  // namespace dovetail::server
