#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace dovetail::server {

// A regular expression (regex_check.h) of texts that have JSON Schema's `format`: every text of it has the format, by
// RFC 3339, 4122, 5321, 1123, 2673 or 4291. It leaves out some that have it, too: years before 1000, leap seconds, IPv6
// addresses that are shortened, quoted mail addresses, long names.
// Returns: empty for a format that is not enforced
// Threads: pure
std::string RegexOfFormat(std::string_view format);

// Those that are, for error texts.
// Threads: pure.
std::vector<std::string> EnforcedFormats();

}  // namespace dovetail::server
