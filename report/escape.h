#pragma once
#include <string>
#include <string_view>

namespace dovetail::report {

// Text as HTML has it, in elements and in attributes within double quotes. Bytes that are not UTF-8 and control
// characters become U+FFFD; a line break becomes a space.
// Threads: pure.
std::string Escaped(std::string_view text);

// Characters of valid UTF-8.
size_t Characters(std::string_view text);

}  // namespace dovetail::report
