#pragma once
#include <cstdint>

namespace dovetail::kernels::cuda {

// Parameters of the sampling kernel: device pointers, plain structs.
// Threads: plain values.

// One row of logits to one token (sampling.h).
struct SampleParams {
  float inverse_temperature = 0;  // 0: greedy
  int32_t top_k = 0;              // 0: off
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  uint32_t seed_low = 0, seed_high = 0;
  int32_t position = 0;
  int32_t first_seen = 0, seen = 0;        // of SampleLaunch.seen
  int32_t first_bias = 0, biases = 0;      // of SampleLaunch.biases
  int32_t first_allowed = 0, allowed = 0;  // of SampleLaunch.allowed; 0: all
  int32_t logprob = 0;                     // 1: the token's log-probability is wanted
};
struct SampleSeen {
  int32_t token = 0, generated = 0;
};
struct SampleBias {
  int32_t token = 0;
  float bias = 0;  // -inf: banned
};
struct SampleOutput {
  int32_t token = 0;
  int32_t error = 0;  // 1: a logit is NaN or +inf; 2: nothing is left to choose
  float logprob = 0;
  int32_t rank = 0;
};
struct SampleLaunch {
  const float* logits = nullptr;  // [rows][step]
  float* work = nullptr;          // [rows][work_step]: rows with biases or penalties
  int64_t step = 0;
  int64_t work_step = 0;
  int32_t rows = 0, vocab = 0;
  const SampleParams* params = nullptr;
  const SampleSeen* seen = nullptr;
  const SampleBias* biases = nullptr;
  const int32_t* allowed = nullptr;
  SampleOutput* out = nullptr;
  SampleOutput* host_out = nullptr;  // the same once more in pinned memory, for the host; or null
};

}  // namespace dovetail::kernels::cuda
