#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "requests/generation.h"
#include "server/openai/answer.h"
#include "server/openai/requests.h"
#include "server/openai/unsupported_fields.h"

namespace dovetail::server {

// How the tokens of one HTTP request become its answer. It holds everything about text, and nothing about sockets.
// Threads: thread-compatible; a value.
struct ResponseSpec {
  Endpoint endpoint = Endpoint::kCompletions;
  std::string id;       // "cmpl-...", "chatcmpl-...", "embd-...", "resp_..." or "msg_..."
  std::string model;    // as the client called it
  int64_t created = 0;  // Unix seconds

  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;

  int n = 1;        // choices shown of each prompt
  int best_of = 1;  // choices generated of each prompt
  bool echo = false;
  bool drop_output = false;  // max_tokens 0: the engine's one token is not shown
  int min_tokens = 0;

  std::vector<std::string> stop;
  std::vector<TokenId> user_stop_token_ids;
  bool include_stop = false;
  bool skip_special_tokens = true;
  int logprobs = -1;
  int prompt_logprobs = -1;
  bool return_token_ids = false;
  bool tokens_as_ids = false;

  std::vector<std::vector<TokenId>> prompts;  // of each engine request, in order

  AnswerSpec answer;  // chat: what is taken out of the text
  AnswerShape shape = AnswerShape::kChat;
  Json repeated;    // kResponses, kLlama: what of the request the answer has, too
  VectorForm form;  // kVectors

  bool chat() const { return endpoint == Endpoint::kChat; }
  bool vectors() const { return shape == AnswerShape::kVectors; }
};

}  // namespace dovetail::server
