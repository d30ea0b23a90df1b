#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

// The lowest and highest second byte after `lead`, and the length announced; length 0 if `lead` cannot begin a
// character.
struct Lead {
  uint8_t length = 0, low = 0x80, high = 0xBF;
};

Lead LeadOf(uint8_t lead) {
  if (lead < 0xC2) return {};
  if (lead < 0xE0) return {2};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};
  if (lead == 0xED) return {3, 0x80, 0x9F};  // no surrogates
  if (lead < 0xF0) return {3};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead < 0xF4) return {4};
  if (lead == 0xF4) return {4, 0x80, 0x8F};
  return {};
}

}  // namespace

Utf8Step NextUtf8(std::string_view text) {
  const uint8_t first = static_cast<uint8_t>(text[0]);
  if (first < 0x80) return {Utf8Kind::kValid, 1, first};
  const Lead lead = LeadOf(first);
  if (lead.length == 0) return {Utf8Kind::kInvalid, 1};
  char32_t code_point = first & (0x7F >> lead.length);
  for (uint8_t i = 1; i < lead.length; ++i) {
    if (i >= text.size()) return {Utf8Kind::kIncomplete, i};
    const uint8_t byte = static_cast<uint8_t>(text[i]);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {Utf8Kind::kInvalid, i};
    code_point = (code_point << 6) | (byte & 0x3F);
  }
  return {Utf8Kind::kValid, lead.length, code_point};
}

size_t ValidUtf8Prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind != Utf8Kind::kValid) break;
    at += step.length;
  }
  return at;
}

void AppendUtf8(char32_t c, std::string& out) {
  if (c < 0x80) {
    out.push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out.push_back(static_cast<char>(0xC0 | (c >> 6)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | (c >> 12)));
    out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out.push_back(static_cast<char>(0xF0 | (c >> 18)));
    out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

void DrainUtf8(std::string& pending, bool finish, std::string& out) {
  const std::string_view text = pending;
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind == Utf8Kind::kIncomplete && !finish) break;
    if (step.kind == Utf8Kind::kValid) {
      out.append(text.substr(at, step.length));
    } else {
      out.append(kReplacementCharacter);
    }
    at += step.length;
  }
  pending.erase(0, at);
}

}  // namespace dovetail::model
