#pragma once
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "engine/engine.h"

// Speed of an Engine as its caller sees it: from Submit to tokens in a sink. Each function blocks until its requests
// have ended and expects the engine to be otherwise idle. Prompts are random token ids that never share a prefix, and
// no token ends a sequence early.
// Threads: one measurement of an engine at a time; updates arrive on the engine's threads.

namespace dovetail::engine {

using TimePoint = std::chrono::steady_clock::time_point;

// Tokens of one sequence that became visible together.
struct Arrival {
  TimePoint time;
  int tokens = 0;
};

// What happened in a measured stretch of time.
struct Window {
  double seconds = 0;
  int64_t tokens = 0;
  TimePoint start{};
  double beside_tokens = 0;  // of prompts read meanwhile (BatchShape); one that was half read counts half

  double tokens_per_s() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  double beside_tokens_per_s() const { return seconds > 0 ? beside_tokens / seconds : 0; }
};

// The stretch in which all sequences decode together: from the moment the last of them shows its first token until
// `tokens_each` tokens per sequence (over all together) have come since. kFailedPrecondition when a sequence ended
// before that, so that the batch was not full throughout.
absl::StatusOr<Window> FullBatchWindow(const std::vector<std::vector<Arrival>>& sequences, int tokens_each);

struct PromptSource {
  int vocab_size = 0;
  uint64_t seed = 1;

  // `length` ids; a different prompt for every call.
  std::vector<TokenId> Next(int length);
};

// One sequence from a single prompt token: `tokens` output tokens, from Submit to the last.
absl::StatusOr<Window> MeasureDecode(Engine& engine, PromptSource& prompts, int tokens);

// One prompt of `tokens`: from Submit to the first output token.
absl::StatusOr<Window> MeasurePrefill(Engine& engine, PromptSource& prompts, int tokens);

struct BatchShape {
  int sequences = 1;
  int prompt_tokens = 128;
  int output_tokens = 64;        // of each sequence, measured
  int tokens_per_step = 512;     // the engine's limit; tells how long prompts take in steps
  int beside_prompt_tokens = 0;  // prompts of so many tokens are read meanwhile, one after the other; 0: none
};
// Output tokens of one of its sequences, the measured ones and those that come while other prompts are still read.
int OutputTokensNeeded(const BatchShape& shape);

// Decoding at a full batch: FullBatchWindow of `shape.sequences` requests submitted at once. Prompts that are read at
// the same time are submitted after them, by a thread of their own. Once more, with longer answers, where the first
// ended before the last prompt was read, because steps took less of the prompts than tokens_per_step.
absl::StatusOr<Window> MeasureBatch(Engine& engine, PromptSource& prompts, const BatchShape& shape);

}  // namespace dovetail::engine
