#include "report/escape.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace dovetail::report {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

bool Continues(char c) { return (static_cast<uint8_t>(c) & 0xC0) == 0x80; }

// Bytes of the character that `text` begins with; 0 if it is not valid UTF-8.
size_t LengthOf(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  if (!std::all_of(text.begin() + 1, text.begin() + static_cast<ptrdiff_t>(length), Continues)) return 0;
  const uint8_t second = byte(1);
  const bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool outside = (first == 0xED && second > 0x9F) || (first == 0xF4 && second > 0x8F);
  return overlong || outside ? 0 : length;
}

void AppendAscii(char c, std::string& out) {
  switch (c) {
    case '&': out += "&amp;"; return;
    case '<': out += "&lt;"; return;
    case '>': out += "&gt;"; return;
    case '"': out += "&quot;"; return;
    case '\'': out += "&#39;"; return;
    case '\n':
    case '\r':
    case '\t': out += ' '; return;
    default: break;
  }
  if (c < ' ' || c == 0x7F)
    out += kReplacement;
  else
    out += c;
}

}  // namespace

std::string Escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = LengthOf(text);
    if (length == 1)
      AppendAscii(text[0], out);
    else
      out += length == 0 ? kReplacement : text.substr(0, length);
    text.remove_prefix(std::max<size_t>(1, length));
  }
  return out;
}

size_t Characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !Continues(c); }));
}

}  // namespace dovetail::report
