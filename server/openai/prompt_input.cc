#include "server/openai/prompt_input.h"

#include "absl/strings/str_cat.h"

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

}  // namespace

absl::StatusOr<std::vector<PromptInput>> ParsePromptInputs(const FieldReader& reader, const std::string& field,
                                                           size_t most, const ServedModel& model) {
  const Json* value = reader.Find(field);
  if (value == nullptr)
    return BadField(field, "is required: a string, an array of strings, token ids, or arrays of token ids");
  std::vector<PromptInput> prompts;
  const bool several =
      value->is_array() && !value->empty() && (value->front().is_string() || value->front().is_array());
  if (!several) {
    DT_ASSIGN_OR_RETURN(prompts.emplace_back(), ParsePrompt(*value, field, model));
    return prompts;
  }
  if (value->size() > most)
    return BadField(field, value->size(), " prompts; at most ", most, " are allowed in one request");
  for (const Json& one : *value) {
    const std::string path = absl::StrCat(field, ".", prompts.size());
    DT_ASSIGN_OR_RETURN(prompts.emplace_back(), ParsePrompt(one, path, model));
  }
  return prompts;
}

}  // namespace dovetail::server
