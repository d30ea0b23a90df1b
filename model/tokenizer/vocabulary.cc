#include "model/tokenizer/vocabulary.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/escaping.h"

namespace dovetail::model {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::optional<uint8_t> ParseByteToken(std::string_view spelling) {
  if (spelling.size() != 6 || spelling.substr(0, 3) != "<0x" || spelling[5] != '>') return std::nullopt;
  const int high = HexDigit(spelling[3]);
  const int low = HexDigit(spelling[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<uint8_t>(high * 16 + low);
}

std::string ReplaceSpmSpaces(std::string_view text) {
  std::string plain;
  plain.reserve(text.size() + 1);
  for (size_t at = 0; at < text.size();) {
    const size_t found = std::min(text.find(kSpmSpace, at), text.size());
    plain.append(text.substr(at, found - at));
    if (found < text.size()) plain.push_back(' ');
    at = found + kSpmSpace.size();
  }
  return plain;
}

std::string QuoteToken(std::string_view spelling) {
  constexpr size_t kShown = 48;
  const std::string_view head = spelling.substr(0, kShown);
  std::string text = absl::StrCat("\"", absl::Utf8SafeCHexEscape(absl::string_view(head.data(), head.size())), "\"");
  if (spelling.size() > kShown) absl::StrAppend(&text, "... (", spelling.size(), " bytes)");
  return text;
}

absl::StatusOr<std::vector<TokenMerge>> ResolveMerges(const std::vector<std::string>& tokens,
                                                      const std::vector<std::pair<std::string, std::string>>& merges,
                                                      std::string_view where) {
  const std::string field(where);
  if (merges.size() > kMaxMerges) {
    return InvalidArgument(field, ": ", merges.size(), " merges exceed the limit of ", kMaxMerges);
  }
  std::unordered_map<std::string_view, TokenId> ids;
  ids.reserve(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) ids.emplace(tokens[id], static_cast<TokenId>(id));

  std::vector<TokenMerge> resolved;
  resolved.reserve(merges.size());
  std::string result;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    result.assign(left).append(right);
    for (const std::string* part : {&left, &right, static_cast<const std::string*>(&result)}) {
      if (part->empty() || !ids.contains(*part)) {
        return InvalidArgument(field, "[", rank, "]: token ", QuoteToken(*part),
                               " is not in the vocabulary; the file is damaged");
      }
    }
    resolved.push_back({ids.at(left), ids.at(right)});
  }
  return resolved;
}

}  // namespace dovetail::model
