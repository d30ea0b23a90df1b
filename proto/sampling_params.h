#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace dovetail::proto {

inline constexpr int kMaxTokenList = 1 << 20;  // of a request's allowed, banned and stop tokens each
inline constexpr int kMaxLogitBias = 1024;
inline constexpr size_t kMaxGrammar = size_t{64} << 10;  // bytes of a grammar
inline constexpr int kMaxGrammarEnds = 1024;

// What the text of a sequence may be: the source of a grammar (grammar/grammar_engine.h), and the tokens that may
// follow a whole text.
struct Grammar {
  std::string source;  // empty: anything
  std::vector<TokenId> ends;
  bool operator==(const Grammar&) const = default;
};

// How the next token of a sequence is chosen. Travels in the step plan. The server validates ranges (server/). A draw
// is argmax(logit / temperature + Gumbel(seed, position, token id)) over the candidates that the filters leave.
// Threads: thread-compatible; a value.
struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // over prompt and output tokens
  float presence_penalty = 0.0f;    // over output tokens
  float frequency_penalty = 0.0f;   // over output tokens
  uint64_t seed = 0;
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::vector<TokenId> allowed_token_ids;  // empty: all
  std::vector<TokenId> banned_token_ids;   // bad words of one token
  int32_t logprobs = -1;                   // top alternatives reported a token; 0: the sampled one only, -1: none
  bool follows_grammar = false;            // `grammar`, or that of SamplingLists, holds
  Grammar grammar;

  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
  // Choosing needs the tokens so far.
  bool needs_history() const { return follows_grammar || has_penalties(); }
  bool operator==(const SamplingParams&) const = default;
};

// The same, with empty lists and an empty grammar.
inline SamplingParams WithoutLists(const SamplingParams& from) {
  SamplingParams params;
  params.temperature = from.temperature;
  params.top_k = from.top_k;
  params.top_p = from.top_p;
  params.min_p = from.min_p;
  params.repetition_penalty = from.repetition_penalty;
  params.presence_penalty = from.presence_penalty;
  params.frequency_penalty = from.frequency_penalty;
  params.seed = from.seed;
  params.logprobs = from.logprobs;
  params.follows_grammar = from.follows_grammar;
  return params;
}

// What of a sequence's sampling grows with its request.
// Threads: immutable once made.
struct SamplingLists {
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::vector<TokenId> allowed_token_ids;  // empty: all
  std::vector<TokenId> banned_token_ids;
  std::vector<TokenId> banned_early;  // where an entry says so: stop tokens before min_tokens
  Grammar grammar;

  bool empty() const {
    return logit_bias.empty() && allowed_token_ids.empty() && banned_token_ids.empty() && banned_early.empty() &&
           grammar.source.empty();
  }
  size_t bytes() const {
    return logit_bias.size() * sizeof(logit_bias[0]) +
           (allowed_token_ids.size() + banned_token_ids.size() + banned_early.size() + grammar.ends.size()) *
               sizeof(TokenId) +
           grammar.source.size();
  }
  bool operator==(const SamplingLists&) const = default;
};

// Equal if both hold equal lists, or both none.
struct SharedLists {
  std::shared_ptr<const SamplingLists> lists;

  bool operator==(const SharedLists& other) const {
    return lists == nullptr || other.lists == nullptr ? lists == other.lists : *lists == *other.lists;
  }
};

// Log probabilities of one position: over the raw logits (temperature 1, no penalties), but only over the tokens that
// the grammar lets follow, if there is one.
struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
  int32_t rank = 0;  // 1: the most probable
  bool operator==(const TokenLogprob&) const = default;
};
struct PositionLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // by falling probability; ties by token id
  bool operator==(const PositionLogprobs&) const = default;
};

}  // namespace dovetail::proto
