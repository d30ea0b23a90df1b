#pragma once
#include <span>
#include <vector>

#include "server/openai/choice.h"
#include "server/openai/json.h"

namespace dovetail::server {

// Log probabilities in the shapes of the OpenAI API (and of vLLM for prompt_logprobs). -inf and NaN, which JSON lacks,
// become -9999. `model` outlives it.
// Threads: immutable.
class LogprobsJson {
 public:
  LogprobsJson(const ServedModel& model, bool tokens_as_ids) : model_(model), tokens_as_ids_(tokens_as_ids) {}

  // {tokens, token_logprobs, top_logprobs, text_offset}. A position whose chosen.token is -1 - id has no probability:
  // the first of a prompt.
  Json Completion(std::span<const ShownLogprob> shown) const;
  // {content: [{token, logprob, bytes, top_logprobs}], refusal: null}
  Json Chat(std::span<const ShownLogprob> shown) const;
  // llama-server's: [{id, token, logprob, bytes, top_logprobs}]
  Json Llama(std::span<const ShownLogprob> shown) const;
  // [null, {id: {logprob, rank, decoded_token}}, ...]
  Json Prompt(std::span<const proto::PositionLogprobs> positions, int alternatives) const;

  std::string TokenString(TokenId id) const;

 private:
  Json ChatEntry(const proto::TokenLogprob& token) const;

  const ServedModel& model_;
  const bool tokens_as_ids_;
};

}  // namespace dovetail::server
