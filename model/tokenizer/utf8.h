#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dovetail::model {

// UTF-8 one step at a time, with the replacement rule of Unicode and WHATWG: one U+FFFD for each maximal part of an
// ill-formed sequence.
// Threads: pure.

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

enum class Utf8Kind : uint8_t { kValid, kInvalid, kIncomplete };

struct Utf8Step {
  Utf8Kind kind = Utf8Kind::kInvalid;
  uint8_t length = 1;       // bytes this step covers, at least 1
  char32_t code_point = 0;  // for kValid
};

// What `text` (not empty) begins with. kIncomplete: the whole of `text` is a proper beginning of some character.
Utf8Step NextUtf8(std::string_view text);

// Offset of the first byte that is not part of a whole valid character; text.size() if there is none.
size_t ValidUtf8Prefix(std::string_view text);

void AppendUtf8(char32_t code_point, std::string& out);

// Moves everything that is certain from the front of `pending` to the end of `out`: whole characters, and U+FFFD for
// what can no longer become one. At most 3 bytes stay in `pending`; none if `finish`.
void DrainUtf8(std::string& pending, bool finish, std::string& out);

}  // namespace dovetail::model
