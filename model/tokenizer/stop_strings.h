#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dovetail::model {

inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopStringBytes = 256;

struct StopMatch {
  int index = 0;     // which stop string, as given; the first of equal ones
  size_t begin = 0;  // where it begins in the text of all pushes
  size_t end = 0;    // one past its last byte
};

// Watches streamed text for stop strings. The match is the one that ends first; of those ending there, the longest. So
// the outcome is a pure function of the text: how it was cut into pushes does not matter. Text that may still be the
// beginning of a stop string is held back (less than kMaxStopStringBytes). Time O(bytes x stop strings).
// Source: Knuth, Morris and Pratt 1977.
// Threads: thread-compatible; a value.
class StopMatcher {
 public:
  // kInvalidArgument for more than kMaxStopStrings, an empty or over-long one, or invalid UTF-8; the message begins
  // with "stop". With `include_stop` the matched string is shown, as include_stop_str_in_output asks.
  static absl::StatusOr<StopMatcher> Create(std::vector<std::string> stop_strings, bool include_stop = false);

  // Appends text (whole characters) and returns what may be shown now. After a match nothing more is ever shown.
  std::string Push(std::string_view text);

  // Appends text in which no stop string counts (before min_tokens): shown at once, and no match begins in it.
  std::string PushUnwatched(std::string_view text);

  // The text has ended: what was held back, if nothing matched.
  std::string Finish();

  const std::optional<StopMatch>& match() const { return match_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<uint16_t> failure;  // failure[k]: longest proper border of the first k bytes
    uint16_t matched = 0;           // bytes of `text` that end the input so far
  };
  StopMatcher() = default;
  void Advance(char byte);

  std::vector<Pattern> patterns_;
  bool include_stop_ = false;
  std::string held_;
  size_t total_ = 0;  // bytes pushed
  std::optional<StopMatch> match_;
};

}  // namespace dovetail::model
