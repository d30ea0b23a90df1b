#pragma once
#include <string>
#include <string_view>

#include "base/status.h"

namespace dovetail::model {

// Unicode normalisation form C of valid UTF-8. O(n log n) for any input, also for long runs of combining marks; text
// without characters from U+0300 on is returned as it is.
// Errors: kInvalidArgument: the text cannot be normalised.
// Threads: pure.
absl::StatusOr<std::string> NormalizeNfc(std::string_view text);

// Whether every byte says that `text` is in that form already; often false of text that is.
// Threads: pure.
bool SurelyNfc(std::string_view text);

// No text has more bytes than so many times those of its normal form; 3.5 times is the most there is (U+1FBE U+0308
// U+0301 becomes U+0390).
inline constexpr size_t kMostNfcShrinks = 4;

// Letter, mark, digit or connector: a single_word token is not matched next to one of these.
bool IsWordCharacter(char32_t c);

// Unicode's White_Space property.
bool IsWhiteSpace(char32_t c);

}  // namespace dovetail::model
