#pragma once
#include <algorithm>
#include <string_view>

#include "server/openai/answers/answer_parser.h"

namespace dovetail::server {

// How much of `text` comes before the white space at its end, of which kMaxUndecided bytes are held back at most.
// Threads: pure.
inline size_t BeforeWhiteSpace(std::string_view text) {
  return std::max(LengthTrimmed(text), text.size() - std::min(text.size(), kMaxUndecided));
}

}  // namespace dovetail::server
