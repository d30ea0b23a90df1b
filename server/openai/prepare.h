#pragma once
#include <string>
#include <variant>
#include <vector>

#include "base/cancel_token.h"
#include "base/status.h"
#include "requests/generation.h"
#include "server/openai/requests.h"
#include "server/openai/response_spec.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

// From a checked request to what the engine runs: renders the template, tokenises, fills in defaults, and checks what
// depends on the prompt's length. Takes up to some 100 ms for a large prompt. Where a new grammar has to be compiled,
// it takes seconds: then it is called again on a thread that only such requests wait for.
// Threads: thread-safe; called on worker threads.

struct RequestContext {
  std::string id;  // of the HTTP request; becomes part of the completion id
  std::string tenant;
  int64_t created = 0;                  // Unix seconds
  uint64_t random_seed = 0;             // used where the request names no seed
  std::string cache_epoch;              // server/work/cache_epochs.h
  uint64_t id_seed = 0;                 // of the ids of calls: another one for each request
  const CancelToken* cancel = nullptr;  // outlives the call
  bool may_compile = true;              // a grammar; else NeedsCompiling says what Prepare says

  // kCancelled once the token says so.
  absl::Status CheckWanted() const;
};

struct PreparedGeneration {
  ResponseSpec spec;
  std::vector<requests::GenerationRequest> requests;  // one for each prompt
};

using ParsedGeneration = std::variant<CompletionRequest, ChatRequest, EmbeddingRequest>;

// Of a status of Prepare: a grammar has to be compiled first, and the context does not allow it.
bool NeedsCompiling(const absl::Status& status);

// kInvalidArgument, with the context sizes if the prompt does not fit. A prompt that is longer than its tokens could
// ever cover is refused by its bytes, before it is tokenised, and tokenising ends at twice the model's positions; then
// the size is a lower bound. A prompt that truncate_prompt_tokens cuts is tokenised whole. kCancelled: context.cancel
// said so before the template was rendered or before a prompt was tokenised.
absl::StatusOr<PreparedGeneration> Prepare(const CompletionRequest& request, const ServedModel& model,
                                           const RequestContext& context);
absl::StatusOr<PreparedGeneration> Prepare(const ChatRequest& request, const ServedModel& model,
                                           const RequestContext& context);
absl::StatusOr<PreparedGeneration> Prepare(const EmbeddingRequest& request, const ServedModel& model,
                                           const RequestContext& context);
absl::StatusOr<PreparedGeneration> Prepare(const ParsedGeneration& request, const ServedModel& model,
                                           const RequestContext& context);

// The ids of a rendered conversation. The model has a tokenizer and a chat template.
absl::StatusOr<std::vector<TokenId>> EncodeChat(const ChatPrompt& prompt, bool add_special, const ServedModel& model);

}  // namespace dovetail::server
