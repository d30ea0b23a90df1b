#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace dovetail::model {

// GPT-2's spelling of bytes: each of the 256 bytes has a printable character (the printable Latin-1 characters stand
// for themselves, the other 68 bytes for U+0100..U+0143), so that any byte string is readable text.
// Source: Radford et al. 2019, encoder.py.
// Threads: pure.

// The bytes that `spelling` stands for, or nullopt if it has a character outside the 256.
std::optional<std::string> BytesOfSpelling(std::string_view spelling);

// The spelling of `bytes`.
std::string SpellingOfBytes(std::string_view bytes);

}  // namespace dovetail::model
