#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/cpu/ops_table.h"

namespace dovetail::kernels {

// One token from one row of logits, in vLLM's order (V1 engine):
//   1. raw log-probabilities, if asked for: log-softmax of the logits as they came ("raw_logprobs")
//   2. allowed ids: all others become -inf;  banned ids (bad words, stop ids before min_tokens): -inf;
//      logit_bias: added
//   3. repetition penalty on every id seen (positive logits divided, others multiplied), then frequency * count and
//      presence subtracted for ids generated
//   4. temperature 0: the largest logit, the lowest id on ties. Otherwise
//      z = (logit - max logit) * (1 / temperature) in f32, and
//   5. min_p keeps z >= ln(min_p);  top_k keeps the k largest, ties with the k-th kept too;  top_p, over the softmax of
//      what is left, keeps the smallest set of largest z whose mass reaches top_p (ties by lower id first), at least
//      one
//   6. argmax of z + Gumbel(seed, position, id) over the kept ids, the lowest id on ties
//
// Gumbel: w = a word of Philox 4x32-10 with key = seed (low, high word) and counter (id/64*16 + id%16, 0, position low,
// position high), word (id/16)%4; v = (w + 0.5) / 2^32; g = -ln(-log1p(-v)) in double. So a draw depends on nothing but
// its seed, position and id, and is an exact sample of the kept distribution up to the 2^-32 grid.
// Source: Salmon et al. 2011 (Philox), Gumbel 1954.

struct TokenBias {
  int32_t token = 0;
  float bias = 0;
};
struct TokenCount {
  int32_t token = 0;
  int32_t generated = 0;  // times among the generated tokens; 0: only in the prompt
};

struct SamplingParams {
  float temperature = 1;         // 0..100; below 1e-5 counts as 0 (greedy)
  int top_k = 0;                 // 0 or less: off
  float top_p = 1;               // (0, 1]
  float min_p = 0;               // [0, 1]
  float repetition_penalty = 1;  // > 0
  float presence_penalty = 0;
  float frequency_penalty = 0;
  uint64_t seed = 0;
  std::span<const TokenBias> logit_bias;
  std::span<const int32_t> allowed;  // empty: all
  std::span<const int32_t> banned;
  std::span<const TokenCount> seen;  // each id once: prompt and generated; needed only if a penalty is set
  int logprobs = -1;                 // -1: none; n >= 0: the sampled token's and the n most likely, n <= kMaxLogprobs

  bool greedy() const { return temperature < 1e-5f; }
};

inline constexpr int kMaxLogprobs = 1024;

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
  int32_t rank = 0;  // 1: the most likely; as vLLM counts it, the number of ids at least as likely
};

struct SampleResult {
  int32_t token = 0;
  TokenLogprob chosen;  // filled if logprobs >= 0
  std::span<const TokenLogprob>
      top;  // params.logprobs entries, most likely first, in the scratch: valid until its next use
};

size_t SamplingScratchBytes(int64_t vocab_size);

// logits [vocab_size] stay as they are. position: the sampled token's position in its sequence.
// Errors:  kInvalidArgument for parameters outside the above, ids outside the vocabulary and when nothing is left to
// choose (the message names the field); kInternal for logits that hold NaN or +inf; kResourceExhausted for a scratch
// that is too small.
// Threads: runs on the caller only, so that the rows of a batch can be spread over a pool; reentrant.
// Memory:  allocates nothing; the scratch is 64-byte aligned.
// Cost:    greedy 2 passes over the row; with filters 3 to 5; without them one pass at ~5 cycles an id for the random
// numbers.
absl::StatusOr<SampleResult> SampleRow(const OpsTable& table, std::span<const float> logits,
                                       const SamplingParams& params, int64_t position, std::span<std::byte> scratch);

// Log-probabilities of a given token, for prompt_logprobs: as SampleResult.chosen and .top would
// be.
// Threads: as SampleRow.
absl::StatusOr<SampleResult> RowLogprobs(const OpsTable& table, std::span<const float> logits, int32_t token, int top,
                                         std::span<std::byte> scratch);

// The noise itself, for tests and for other devices.
double GumbelNoise(uint64_t seed, int64_t position, int32_t token);

}  // namespace dovetail::kernels
