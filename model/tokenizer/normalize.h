#pragma once
#include <string>
#include <string_view>

#include "base/status.h"

namespace dovetail::model {

// Unicode normalisation form C of valid UTF-8. O(n log n) for any input, also for long runs of combining marks; text
// without characters from U+0300 on is returned as it is. Pure; thread-safe.
absl::StatusOr<std::string> NormalizeNfc(std::string_view text);

// Letter, mark, digit or connector: what a single_word token may not stand beside.
bool IsWordCharacter(char32_t c);

// Unicode's White_Space property.
bool IsWhiteSpace(char32_t c);

}  // namespace dovetail::model
