#include "model/chat_template/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/ascii.h"

namespace dovetail::model::jinja {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

utf8proc_category_t Category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

// map_ascii does what `map` does, for the ASCII characters that most texts have.
std::string MapCase(std::string_view bytes, utf8proc_int32_t (*map)(utf8proc_int32_t),
                    char (*map_ascii)(unsigned char)) {
  std::string out;
  out.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    if (absl::ascii_isascii(static_cast<unsigned char>(bytes[at]))) {
      out.push_back(map_ascii(static_cast<unsigned char>(bytes[at++])));
      continue;
    }
    const char32_t c = DecodeAt(bytes, at);
    AppendUtf8(static_cast<char32_t>(map(static_cast<utf8proc_int32_t>(c))), out);
  }
  return out;
}

}  // namespace

bool IsValidUtf8(std::string_view bytes) {
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(bytes.data());
  for (size_t at = 0; at < bytes.size();) {
    if (data[at] < 0x80) {
      ++at;
      continue;
    }
    utf8proc_int32_t unused;
    const auto length = utf8proc_iterate(data + at, static_cast<utf8proc_ssize_t>(bytes.size() - at), &unused);
    if (length <= 0) return false;
    at += static_cast<size_t>(length);
  }
  return true;
}

size_t CodePointBytes(unsigned char lead) {
  if (lead < 0xC0) return 1;
  if (lead < 0xE0) return 2;
  return lead < 0xF0 ? 3 : 4;
}

char32_t DecodeAt(std::string_view bytes, size_t& offset) {
  const auto lead = static_cast<unsigned char>(bytes[offset]);
  if (lead < 0x80) {
    ++offset;
    return lead;
  }
  utf8proc_int32_t c = 0;
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(bytes.data() + offset);
  const auto length = utf8proc_iterate(data, static_cast<utf8proc_ssize_t>(bytes.size() - offset), &c);
  offset += length > 0 ? static_cast<size_t>(length) : 1;
  return length > 0 ? static_cast<char32_t>(c) : kReplacement;
}

size_t PreviousOffset(std::string_view bytes, size_t offset) {
  --offset;
  while (offset > 0 && (static_cast<unsigned char>(bytes[offset]) & 0xC0) == 0x80) --offset;
  return offset;
}

void AppendUtf8(char32_t code_point, std::string& out) {
  if (code_point < 0x80) {
    out.push_back(static_cast<char>(code_point));
    return;
  }
  if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point <= 0xDFFF)) code_point = kReplacement;
  utf8proc_uint8_t buffer[4];
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(length));
}

size_t CountCodePoints(std::string_view bytes) {
  return static_cast<size_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

size_t OffsetOfCodePoint(std::string_view bytes, size_t index) {
  size_t at = 0;
  while (index > 0 && at < bytes.size()) {
    at += CodePointBytes(static_cast<unsigned char>(bytes[at]));
    --index;
  }
  return std::min(at, bytes.size());
}

size_t FindBytes(std::string_view text, std::string_view what, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (what.empty()) return from;
  const void* found = memmem(text.data() + from, text.size() - from, what.data(), what.size());
  return found ? static_cast<size_t>(static_cast<const char*>(found) - text.data()) : std::string_view::npos;
}

// Knuth, Morris and Pratt 1977, from the right.
size_t FindLastBytes(std::string_view text, std::string_view what) {
  if (what.empty()) return text.size();
  const size_t length = what.size();
  if (length > text.size()) return std::string_view::npos;
  std::vector<size_t> border(length, 0);  // of the reversed pattern's prefixes
  const auto pattern = [&](size_t i) { return what[length - 1 - i]; };
  for (size_t i = 1, matched = 0; i < length; ++i) {
    while (matched > 0 && pattern(i) != pattern(matched)) matched = border[matched - 1];
    matched += pattern(i) == pattern(matched);
    border[i] = matched;
  }
  for (size_t at = text.size(), matched = 0; at-- > 0;) {
    while (matched > 0 && text[at] != pattern(matched)) matched = border[matched - 1];
    matched += text[at] == pattern(matched);
    if (matched == length) return at;
  }
  return std::string_view::npos;
}

bool IsSpace(char32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsAlpha(char32_t c) {
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return true;
    default: return false;
  }
}

bool IsDigit(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_ND; }
bool IsUpper(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_LU; }
bool IsLower(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_LL; }

bool IsPrintable(char32_t c) {
  if (c < 0x80) return c >= 0x20 && c < 0x7F;
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
  }
}

std::string ToUpper(std::string_view bytes) { return MapCase(bytes, utf8proc_toupper, absl::ascii_toupper); }
std::string ToLower(std::string_view bytes) { return MapCase(bytes, utf8proc_tolower, absl::ascii_tolower); }

}  // namespace dovetail::model::jinja
