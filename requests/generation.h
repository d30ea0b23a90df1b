#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/ids.h"
#include "base/trace_context.h"
#include "proto/sampling_params.h"

// A generation request and its updates, as the server, the control plane and the scheduler share them. Text, HTTP and
// JSON stay in server/.
// Threads: plain values.

namespace dovetail::requests {

inline constexpr int kMaxChoices = 8;

// Which of a prompt's final hidden states (after the final norm) are averaged to one vector.
enum class Pooling : uint8_t {
  kNone = 0,  // the request asks for tokens
  kMean = 1,  // all
  kLast = 2,  // the last token's
  kCls = 3,   // the first token's
};

// Shared (shared_ptr<const>) between the server that made it and the scheduler that runs it.
// Threads: immutable once submitted.
struct GenerationRequest {
  RequestId id;
  std::string tenant;           // the unit of billing and fairness, and the salt of the prefix cache
  std::string cache_salt;       // further keeps prefix blocks apart; empty: the tenant's own
  int priority = 0;             // lower runs first among one tenant's requests
  std::vector<TokenId> prompt;  // >= 1 token
  int choices = 1;              // 1..kMaxChoices; choice i draws with the seed `sampling.seed + i`
  proto::SamplingParams sampling;
  int max_tokens = 16;  // output tokens of each choice; 0: the prompt is all
  int min_tokens = 0;   // end tokens cannot be chosen before
  std::vector<TokenId>
      stop_token_ids;  // end a choice when chosen; the token is reported (the server decides whether to show it)
  int prompt_logprobs =
      -1;  // >= 0: log probabilities of prompt positions 1.. with this many alternatives; bypasses prefix hits
  int logits_last = 0;            // return the logits of this many last prompt positions
  bool logits_of_output = false;  // and of each sampled position
  bool use_prefix_cache = true;
  bool prompt_progress = false;      // updates say how far the prompt is, choice 0's
  Pooling pooling = Pooling::kNone;  // else: the vector is all that is wanted, max_tokens is 0 and choices 1
  // Requests of one client's call have the same number, not 0: once one of them ran, a full queue neither refuses nor
  // pushes out another, since the client may have been shown tokens already.
  uint64_t call = 0;
  // Under which span of a trace it runs. Not sampled: nothing is recorded of it.
  TraceContext trace;
  // It runs there alone, while that worker is connected and may take it. Not set: anywhere.
  std::optional<WorkerId> only_attention_worker, only_compute_worker;
};

enum class FinishReason : uint8_t {
  kStop = 0,    // a stop token, or the server found a stop string
  kLength = 1,  // max_tokens or the model's positions
  kCancelled = 2,
  kError = 3,  // `error` says what
};

// One thing that happened to a request; delivered in order, each position of each choice exactly once.
struct GenerationUpdate {
  RequestId request;
  int choice = 0;

  absl::InlinedVector<TokenId, 4> tokens;         // new output tokens, [first_index, first_index + size)
  int first_index = 0;                            // of tokens[0] among the choice's output tokens
  std::vector<proto::PositionLogprobs> logprobs;  // per token, if asked for
  std::vector<std::vector<float>> logits;         // per token, if asked for

  std::vector<proto::PositionLogprobs> prompt_logprobs;  // appended, positions in order (choice 0 only)
  std::vector<float> prompt_logits;  // [logits_last, vocab], once, before the first token (choice 0 only)
  int prompt_done = 0;               // with prompt_progress: tokens of the prompt that are read; 0: no news
  std::vector<float> pooled;         // [hidden], once, with pooling: the average, not normalised

  bool choice_finished = false;
  FinishReason reason = FinishReason::kStop;
  TokenId stop_token = -1;  // the one that ended it, if one did
  // That had a part in the choice, once it finished.
  absl::InlinedVector<WorkerId, 2> attention_workers, compute_workers;
  std::string error;
  absl::StatusCode error_code = absl::StatusCode::kOk;

  bool request_finished = false;  // nothing follows
  int prompt_tokens = 0;          // valid from the first update on
  int cached_tokens = 0;          // of the prompt, from the prefix cache
  int64_t queued_us = 0;          // from arrival until it first got a slot, or until now
};

}  // namespace dovetail::requests
