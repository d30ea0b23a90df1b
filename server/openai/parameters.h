#pragma once
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

// Every numeric field of a request and the range it may have: the one table behind validation, its tests and the error
// texts. What a model further limits (max_tokens, token ids) is checked when the prompt is known (prepare.h).
// Threads: constants.

namespace dovetail::server {

inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopBytes = 256;
inline constexpr int kMaxStopTokenIds = 128;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxBadWords = 256;
inline constexpr int kMaxPrompts = 128;
inline constexpr int kMaxMessages = 2048;
inline constexpr int kMaxEmbeddingInputs = 2048;
inline constexpr int64_t kMaxEmbeddingValues = int64_t{1} << 24;  // of all vectors of an answer together
inline constexpr int64_t kMaxDimensions = int64_t{1} << 20;
inline constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

struct IntRule {
  std::string_view name;
  int64_t min;
  int64_t max;
};
struct FloatRule {
  std::string_view name;
  double min;
  double max;
};

inline constexpr IntRule kIntRules[] = {
    {"max_tokens", -1, kInt32Max},  // -1: as many as fit
    {"max_completion_tokens", -1, kInt32Max},
    {"n_predict", -1, kInt32Max},
    {"min_tokens", 0, kInt32Max},
    {"n", 1, 8},
    {"best_of", 1, 8},
    {"top_k", -1, kInt32Max},
    {"logprobs", 0, kMaxLogprobs},      // completions; a boolean in chat
    {"top_logprobs", 0, kMaxLogprobs},  // chat
    {"prompt_logprobs", 0, kMaxLogprobs},
    {"seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()},
    {"truncate_prompt_tokens", -1, kInt32Max},
    {"dimensions", 1, kMaxDimensions},
    {"embd_normalize", -1, 2},
    {"priority", -kInt32Max - 1, kInt32Max},
};

inline constexpr FloatRule kFloatRules[] = {
    {"temperature", 0.0, 100.0},
    {"top_p", 0.0, 1.0},
    {"min_p", 0.0, 1.0},
    {"repetition_penalty", 0.01, 10.0},
    {"repeat_penalty", 0.01, 10.0},
    {"presence_penalty", -2.0, 2.0},
    {"frequency_penalty", -2.0, 2.0},
    {"logit_bias", -100.0, 100.0},  // each value
};

}  // namespace dovetail::server
