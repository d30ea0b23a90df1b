#include "scheduler/core/request_checks.h"

#include "base/status.h"
#include "proto/step_plan.h"

namespace dovetail::scheduler {
namespace {

using requests::GenerationRequest;
using requests::kMaxChoices;

absl::Status CheckList(const char* field, size_t size, size_t most) {
  if (size <= most) return absl::OkStatus();
  return InvalidArgument(field, ": ", size, " tokens; at most ", most, " are allowed");
}

absl::Status CheckLists(const GenerationRequest& request) {
  const proto::SamplingParams& sampling = request.sampling;
  DT_RETURN_IF_ERROR(CheckList("logit_bias", sampling.logit_bias.size(), proto::kMaxLogitBias));
  DT_RETURN_IF_ERROR(CheckList("allowed_token_ids", sampling.allowed_token_ids.size(), proto::kMaxTokenList));
  DT_RETURN_IF_ERROR(CheckList("bad_words", sampling.banned_token_ids.size(), proto::kMaxTokenList));
  if (sampling.follows_grammar && (sampling.grammar.source.empty() || sampling.grammar.ends.empty()))
    return InvalidArgument("grammar: has no source, or no token that ends its text");
  if (sampling.grammar.source.size() > proto::kMaxGrammar || sampling.grammar.ends.size() > proto::kMaxGrammarEnds)
    return InvalidArgument("grammar: ", sampling.grammar.source.size(), " bytes and ", sampling.grammar.ends.size(),
                           " end tokens; at most ", proto::kMaxGrammar, " and ", proto::kMaxGrammarEnds,
                           " are allowed");
  return CheckList("stop_token_ids", request.stop_token_ids.size(), proto::kMaxTokenList);
}

}  // namespace

absl::Status CheckRequest(const GenerationRequest& request, const SchedulerOptions& options) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt < 1) return InvalidArgument("prompt: has no token; give at least one");
  if (request.choices < 1 || request.choices > kMaxChoices) {
    return InvalidArgument("n: ", request.choices, " is not in 1..", kMaxChoices);
  }
  if (request.max_tokens < 0) return InvalidArgument("max_tokens: ", request.max_tokens, " is negative");
  if (request.min_tokens < 0) return InvalidArgument("min_tokens: ", request.min_tokens, " is negative");
  if (request.logits_last < 0 || request.logits_last > prompt) {
    return InvalidArgument("logits_last: ", request.logits_last, " is not in 0..", prompt,
                           ", the length of the prompt");
  }
  if (request.prompt_logprobs > proto::kMaxTopLogprobs) {
    return InvalidArgument("prompt_logprobs: ", request.prompt_logprobs, " is more than ", proto::kMaxTopLogprobs);
  }
  if (request.pooling != requests::Pooling::kNone && (request.max_tokens != 0 || request.choices != 1))
    return InvalidArgument("pooling: a request for a vector has max_tokens 0 and n 1, not ", request.max_tokens,
                           " and ", request.choices);
  DT_RETURN_IF_ERROR(CheckLists(request));
  const int64_t longest = options.max_model_len - (request.max_tokens > 0 ? 1 : 0);
  if (prompt > longest) {
    return InvalidArgument("prompt: ", prompt, " tokens, but this server takes ", longest, " (--max-model-len ",
                           options.max_model_len, ", output included); shorten the prompt");
  }
  return absl::OkStatus();
}

}  // namespace dovetail::scheduler
