#pragma once
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "server/openai/answer.h"
#include "server/openai/chat_body.h"
#include "server/openai/json.h"
#include "server/openai/served_model.h"
#include "server/openai/tools.h"

// The bodies of the POST routes as typed values. Parsing checks everything that can be known without tokenising; fields
// that exist elsewhere but not here are refused by name (unsupported_fields.h), unknown ones are ignored.
// Threads: plain values and pure functions.

namespace dovetail::server {

// What both generation endpoints share. An optional that is empty was absent or null.
struct GenerationFields {
  std::string model;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;

  int n = 1;
  int best_of = 1;  // >= n
  std::optional<int64_t> max_tokens;
  int min_tokens = 0;
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int> top_k;
  std::optional<int64_t> seed;
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::vector<TokenId> allowed_token_ids;
  std::vector<std::string> bad_words;

  std::string grammar, grammar_param;  // what the text may be (grammar_engine.h), and the field that says so

  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool include_stop_str_in_output = false;
  bool ignore_eos = false;

  bool return_progress = false;  // a stream tells how far its prompt is

  bool skip_special_tokens = true;
  std::optional<bool> add_special_tokens;
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  std::optional<int64_t> truncate_prompt_tokens;  // -1: to what the model can hold
  int logprobs = -1;                              // alternatives a token; -1: none
  int prompt_logprobs = -1;
  bool echo = false;

  int priority = 0;
  std::string cache_salt;
  bool use_prefix_cache = true;
};

using PromptInput = std::variant<std::string, std::vector<TokenId>>;

struct CompletionRequest {
  GenerationFields fields;
  std::vector<PromptInput> prompts;  // >= 1, none empty

  AnswerShape shape = AnswerShape::kChat;
  Json repeated;  // kLlama: what else the answer is to have (llama_server.h)
};

// How vectors are shown.
struct VectorForm {
  bool base64 = false;    // of f32, little-endian
  int dimensions = 0;     // so many first values, normalised again; 0: all
  bool normalise = true;  // to length 1
  bool llama = false;     // in llama-server's own form
};

struct EmbeddingRequest {
  GenerationFields fields;
  std::vector<PromptInput> inputs;  // >= 1, none empty
  std::string input_field;          // where they came from
  VectorForm form;
};

struct ChatRequest {
  GenerationFields fields;
  ChatPrompt prompt;
  ToolUse tools;
  bool show_reasoning = true;

  AnswerShape shape = AnswerShape::kChat;
  FieldNames names;  // where its fields came from, if they are another API's
  Json repeated;     // kResponses: fields of the request that the answer has, too
};

struct TokenizeRequest {
  std::string model;  // may be empty: the served one
  std::variant<std::string, ChatPrompt> input;
  bool add_special = true;
  bool parse_special = true;
  bool with_pieces = false;
  bool return_token_strs = false;
};

struct DetokenizeRequest {
  std::string model;
  std::vector<TokenId> tokens;
};

// kInvalidArgument with the field (api_error.h), or kNotFound for a model that is not served.
absl::StatusOr<CompletionRequest> ParseCompletionRequest(const Json& body, const ServedModel& model);
// /v1/embeddings.
absl::StatusOr<EmbeddingRequest> ParseEmbeddingRequest(const Json& body, const ServedModel& model);
// /embedding and /embeddings, llama-server's own.
absl::StatusOr<EmbeddingRequest> ParseLlamaEmbeddingRequest(const Json& body, const ServedModel& model);
absl::StatusOr<ChatRequest> ParseChatRequest(const Json& body, const ServedModel& model);
// /v1/responses, as a chat. Fields that it shares with /v1/chat/completions mean what they mean there, those for
// sampling that other servers know, too.
absl::StatusOr<ChatRequest> ParseResponsesRequest(const Json& body, const ServedModel& model);
// /v1/messages and /v1/messages/count_tokens, Anthropic's API, likewise. To count tokens, max_tokens may be left out.
absl::StatusOr<ChatRequest> ParseMessagesRequest(const Json& body, const ServedModel& model);
absl::StatusOr<ChatRequest> ParseCountTokensRequest(const Json& body, const ServedModel& model);
absl::StatusOr<TokenizeRequest> ParseTokenizeRequest(const Json& body, const ServedModel& model);
absl::StatusOr<DetokenizeRequest> ParseDetokenizeRequest(const Json& body, const ServedModel& model);

// The messages of a chat as the template gets them: text parts joined by newlines, `developer` as `system`, the
// arguments of calls as objects, results with the name of their function.
absl::StatusOr<Json> ParseMessages(const Json& value);

}  // namespace dovetail::server
