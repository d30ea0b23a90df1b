#include "server/openai/gbnf_characters.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::server::gbnf {
namespace {

constexpr std::pair<uint32_t, char> kShortEscapes[] = {{'"', '"'},  {'\\', '\\'}, {'\n', 'n'}, {'\r', 'r'},
                                                       {'\t', 't'}, {'\b', 'b'},  {'\f', 'f'}};

bool NeedsEscape(uint32_t c) { return c < ' ' || c == '"' || c == '\\'; }

// As a JSON string has it.
std::vector<uint32_t> Escaped(uint32_t c) {
  if (!NeedsEscape(c)) return {c};
  for (const auto& [character, letter] : kShortEscapes)
    if (character == c) return {'\\', static_cast<uint32_t>(letter)};
  const std::string digits = absl::StrFormat("\\u%04x", c);
  return {digits.begin(), digits.end()};
}

std::string Quoted(const std::vector<uint32_t>& text) {
  std::string quoted = "\"";
  for (const uint32_t c : text) quoted += Spelled(c);
  return quoted + '"';
}

Part Terminal(std::string terminal) {
  Part part;
  part.terminal = std::move(terminal);
  return part;
}

// Characters that stand in a JSON string as they are.
Ranges Plain(const Ranges& ranges) {
  Ranges plain;
  const auto add = [&](uint32_t first, uint32_t last, uint32_t from, uint32_t to) {
    if (std::max(first, from) <= std::min(last, to)) plain.emplace_back(std::max(first, from), std::min(last, to));
  };
  for (const auto& [first, last] : ranges) {
    add(first, last, ' ', '"' - 1);
    add(first, last, '"' + 1, '\\' - 1);
    add(first, last, '\\' + 1, kLastCodePoint);
  }
  return plain;
}

bool Holds(const Ranges& ranges, uint32_t c) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [c](const auto& range) { return range.first <= c && c <= range.second; });
}

}  // namespace

Ranges Normal(Ranges ranges, bool negated) {
  std::sort(ranges.begin(), ranges.end());
  Ranges normal;
  const auto add = [&](uint32_t first, uint32_t last) {
    if (first <= last) normal.emplace_back(first, last);
  };
  const auto add_characters = [&](uint32_t first, uint32_t last) {
    add(first, std::min(last, kFirstSurrogate - 1));
    add(std::max(first, kBehindSurrogates), last);
  };
  uint32_t next = 1;  // of what the ranges so far leave out
  for (const auto& [first, last] : ranges) {
    if (negated && first > next) add_characters(next, first - 1);
    if (!negated && last >= next) add_characters(std::max(first, next), last);
    next = std::max(next, last + 1);
  }
  if (negated) add_characters(next, kLastCodePoint);
  return normal;
}

std::string Spelled(uint32_t c) {
  const bool plain = c >= 128 || absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == ' ';
  if (!plain) return absl::StrFormat("\\U%08X", c);
  std::string text;
  model::AppendUtf8(c, text);
  return text;
}

std::string ClassOf(const Ranges& ranges) {
  if (ranges.empty()) return "";
  std::string text;
  for (const auto& [first, last] : ranges)
    absl::StrAppend(&text, Spelled(first), first == last ? "" : absl::StrCat("-", Spelled(last)));
  return absl::StrCat("[", text, "]");
}

Part LiteralPart(const std::vector<uint32_t>& text, Spelling spelling) {
  std::vector<uint32_t> spelled;
  for (const uint32_t c : text) {
    const std::vector<uint32_t> one = spelling == Spelling::kJson ? Escaped(c) : std::vector<uint32_t>{c};
    spelled.insert(spelled.end(), one.begin(), one.end());
  }
  Part part = Terminal(Quoted(spelled));
  part.empty = text.empty();
  return part;
}

Part ClassPart(const Ranges& ranges, bool negated, Spelling spelling) {
  if (spelling == Spelling::kText) return Terminal(ClassOf(ranges));
  Part part;
  if (const std::string plain = ClassOf(Plain(ranges)); !plain.empty()) part.alternatives.push_back({Terminal(plain)});
  for (uint32_t c = 1; c <= '\\'; ++c) {
    if (!NeedsEscape(c) || !Holds(ranges, c) || (negated && Escaped(c).size() > 2)) continue;
    part.alternatives.push_back({Terminal(Quoted(Escaped(c)))});
  }
  if (part.alternatives.size() == 1) return Part(part.alternatives.front().front());
  return part;
}

}  // namespace dovetail::server::gbnf
