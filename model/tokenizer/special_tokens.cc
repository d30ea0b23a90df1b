#include "model/tokenizer/special_tokens.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "model/tokenizer/normalize.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

// The character that ends right before `at`, or 0 at the beginning.
char32_t CharacterBefore(std::string_view text, size_t at, size_t& begin) {
  if (at == 0) return 0;
  begin = at - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return NextUtf8(text.substr(begin)).code_point;
}

bool StandsAlone(std::string_view text, size_t begin, size_t end) {
  size_t unused = 0;
  if (begin > 0 && IsWordCharacter(CharacterBefore(text, begin, unused))) return false;
  return end == text.size() || !IsWordCharacter(NextUtf8(text.substr(end)).code_point);
}

size_t SkipSpaceLeft(std::string_view text, size_t floor, size_t at) {
  size_t begin = at;
  while (at > floor && IsWhiteSpace(CharacterBefore(text, at, begin))) at = begin;
  return at;
}

size_t SkipSpaceRight(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Step step = NextUtf8(text.substr(at));
    if (!IsWhiteSpace(step.code_point)) break;
    at += step.length;
  }
  return at;
}

}  // namespace

absl::StatusOr<SpecialTokenCutter> SpecialTokenCutter::Create(const TokenizerData& data) {
  SpecialTokenCutter cutter;
  cutter.entry_of_node_.push_back(-1);
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    const TokenType type = data.types[id];
    const bool control = type == TokenType::kControl || type == TokenType::kUnknown;
    if (!control && type != TokenType::kUserDefined) continue;
    const std::string& spelling = data.tokens[id];
    if (spelling.size() > kMaxSpecialTokenBytes) {
      return InvalidArgument("tokens[", id, "]: special token ", QuoteToken(spelling), " exceeds the limit of ",
                             kMaxSpecialTokenBytes, " bytes");
    }
    int32_t node = 0;
    for (const char byte : spelling) {
      const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
      const auto [child, inserted] = cutter.child_.try_emplace(key, static_cast<int32_t>(cutter.entry_of_node_.size()));
      if (inserted) cutter.entry_of_node_.push_back(-1);
      node = child->second;
    }
    cutter.entry_of_node_[node] = static_cast<int32_t>(cutter.entries_.size());
    cutter.first_byte_[static_cast<uint8_t>(spelling[0])] = true;
    cutter.entries_.push_back({static_cast<TokenId>(id), control, {}});
  }
  for (const CutRule& rule : data.cut_rules) {
    for (Entry& entry : cutter.entries_) {
      if (entry.id == rule.id) entry.rule = rule;
    }
  }
  return cutter;
}

int32_t SpecialTokenCutter::Child(int32_t node, uint8_t byte) const {
  const auto found = child_.find(static_cast<uint64_t>(node) << 8 | byte);
  return found == child_.end() ? -1 : found->second;
}

SpecialTokenCutter::Found SpecialTokenCutter::LongestAt(std::string_view text, size_t at, size_t control_end) const {
  Found best;
  int32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    node = Child(node, static_cast<uint8_t>(text[i]));
    if (node < 0) break;
    const int32_t entry = entry_of_node_[node];
    if (entry < 0 || (entries_[entry].control && i + 1 > control_end)) continue;
    if (entries_[entry].rule.single_word && !StandsAlone(text, at, i + 1)) continue;
    best = {entry, i + 1};
  }
  return best;
}

std::vector<TextFragment> SpecialTokenCutter::Cut(std::string_view text, std::span<const TextSpan> spans) const {
  std::vector<TextFragment> fragments;
  size_t done = 0, at = 0, span = 0;
  // Where the stretch of allowed spans around `at` ends; 0 if `at` lies in a span that allows none.
  size_t control_end = 0, span_end = 0;
  while (at < text.size()) {
    while (at >= span_end && span < spans.size()) {
      const bool allowed = spans[span].control_allowed;
      span_end = spans[span++].end;
      while (allowed && span < spans.size() && spans[span].control_allowed) span_end = spans[span++].end;
      control_end = allowed ? span_end : 0;
    }
    if (!first_byte_[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const Found found = LongestAt(text, at, control_end);
    if (found.entry < 0) {
      ++at;
      continue;
    }
    const Entry& entry = entries_[found.entry];
    const size_t text_end = entry.rule.strip_left ? SkipSpaceLeft(text, done, at) : at;
    if (text_end > done) fragments.push_back({-1, done, text_end});
    fragments.push_back({entry.id, at, found.end});
    done = at = entry.rule.strip_right ? SkipSpaceRight(text, found.end) : found.end;
  }
  if (done < text.size()) fragments.push_back({-1, done, text.size()});
  return fragments;
}

}  // namespace dovetail::model
