#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

// Small pieces of the error texts of model files.
// Threads: pure.

namespace dovetail::model {

// The last component of `path`: error texts never show where on this machine a file lies.
std::string BaseName(const std::filesystem::path& path);

// Bytes from an untrusted file as one printable line: escaped, cut after 80 bytes.
std::string Printable(std::string_view bytes);

// 1327104 -> "1,327,104".
std::string Commas(uint64_t value);

}  // namespace dovetail::model
