#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "grammar/grammar_engine.h"
#include "model/prompt_part.h"
#include "requests/generation.h"
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/thoughts.h"
#include "server/openai/json.h"

namespace dovetail::model {
class Tokenizer;
}

namespace dovetail::server {

// A conversation as the chat template sees it.
struct ChatPrompt {
  Json messages;  // checked: array of {role, content: string or null, ...}
  Json tools;     // checked: array of functions; null: none
  bool add_generation_prompt = true;
  bool continue_final_message = false;    // end the prompt where the last message's text does; excludes the former
  Json template_kwargs = Json::object();  // values only
};

// Renders a conversation; bounded in time and memory. kInvalidArgument: this conversation cannot be rendered (the
// template raised an error, or the conversation is too large for its limits).
// Threads: thread-safe.
using ChatRenderer = std::function<absl::StatusOr<std::vector<model::PromptPart>>(const ChatPrompt&)>;

// What generation_config.json (or the GGUF file) recommends, used where a request says nothing.
struct SamplingDefaults {
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int> top_k;
};

// Everything the API knows about the one model behind it.
// Threads: immutable, shared by all threads.
struct ServedModel {
  std::vector<std::string> names;  // at least one; the first is the one responses show
  bool accept_any_name = false;    // do not answer 404 for an unknown `model`

  std::shared_ptr<const model::Tokenizer> tokenizer;  // null: a model without one takes token ids and returns them
  std::shared_ptr<grammar::GrammarEngine> grammars;   // null without a tokenizer
  ChatRenderer chat;                                  // empty: no chat template, /v1/chat/completions answers 400
  const CallFormat* calls = nullptr;                  // how it writes calls; null: it cannot be offered tools
  const ThoughtFormat* thoughts = nullptr;            // how it marks thoughts; null: it has none

  std::string chat_template;          // its text, to be shown; empty: none
  std::string chat_template_warning;  // why chats may be answered badly, for the log; empty: no reason is known
  int max_num_seqs = 0;               // sequences that run at once; 0: not known

  int max_model_len = 0;  // prompt and output tokens of a sequence, by --max-model-len and the model
  // The same where the KV caches hold `longest_sequence` tokens of one (SchedulerStats); 0: not known.
  int64_t UsableLength(int64_t longest_sequence) const {
    return longest_sequence > 0 ? std::min<int64_t>(max_model_len, longest_sequence) : max_model_len;
  }
  int vocab_size = 0;                                    // rows of the output layer
  int64_t hidden_size = 0;                               // of a token's hidden state; 0: not known
  requests::Pooling pooling = requests::Pooling::kLast;  // of /v1/embeddings; kNone: why_no_pooling says why
  std::string why_no_pooling;
  std::vector<TokenId> end_token_ids;  // end a choice unless ignore_eos
  SamplingDefaults defaults;

  std::string owned_by = "dovetail";
  int64_t created = 0;  // Unix seconds
  std::string fingerprint = "fp_dovetail";
};

}  // namespace dovetail::server
