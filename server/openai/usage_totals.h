#pragma once
#include <cstdint>

namespace dovetail::server {

// Tokens of one generation request.
// Threads: thread-compatible; a value.
struct UsageTotals {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // of every choice generated, shown or not
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;  // of completion_tokens, those of thoughts
};

}  // namespace dovetail::server
