// Tokenizer::Create: checks what a model file said and builds the tables.
#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

bool IsMergeable(TokenType type) { return type == TokenType::kNormal || type == TokenType::kUserDefined; }

bool KnownType(TokenType type) { return type >= TokenType::kNormal && type <= TokenType::kByte; }

absl::Status CheckTokens(const TokenizerData& data) {
  const size_t count = data.tokens.size();
  if (count == 0) return InvalidArgument("tokens: the vocabulary is empty");
  if (count > kMaxVocabularyTokens) {
    return InvalidArgument("tokens: ", count, " tokens exceed the limit of ", kMaxVocabularyTokens);
  }
  if (data.types.size() != count)
    return InvalidArgument("token types: ", data.types.size(), " entries for ", count, " tokens");
  std::unordered_set<std::string_view> seen;
  seen.reserve(count);
  for (size_t id = 0; id < count; ++id) {
    const std::string& spelling = data.tokens[id];
    const TokenType type = data.types[id];
    if (!KnownType(type))
      return InvalidArgument("token types[", id, "]: ", static_cast<int>(type), " is not one of 1..6");
    if (spelling.size() > kMaxTokenBytes) {
      return InvalidArgument("tokens[", id, "]: ", spelling.size(), " bytes exceed the limit of ", kMaxTokenBytes);
    }
    if (spelling.empty()) {
      if (type == TokenType::kUnused) continue;
      return InvalidArgument("tokens[", id, "]: an empty token that is not marked unused");
    }
    if (!seen.insert(spelling).second) {
      return InvalidArgument("tokens[", id, "]: ", QuoteToken(spelling),
                             " is in the vocabulary twice; the file is damaged");
    }
    if (type == TokenType::kByte && !ParseByteToken(spelling)) {
      return InvalidArgument("tokens[", id, "]: byte token ", QuoteToken(spelling), " is not one of <0x00>..<0xFF>");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckId(const TokenizerData& data, std::string_view field, TokenId id) {
  if (id >= 0 && static_cast<size_t>(id) < data.tokens.size()) return absl::OkStatus();
  return InvalidArgument(std::string(field), ": token id ", id, " is outside the vocabulary of ", data.tokens.size());
}

absl::Status CheckIds(const TokenizerData& data) {
  const std::pair<std::string_view, const std::optional<TokenId>*> roles[] = {
      {"bos token", &data.special.bos},     {"eos token", &data.special.eos}, {"unknown token", &data.special.unk},
      {"padding token", &data.special.pad}, {"eot token", &data.special.eot}, {"eom token", &data.special.eom}};
  for (const auto& [name, id] : roles) {
    if (id->has_value()) DT_RETURN_IF_ERROR(CheckId(data, name, **id));
  }
  for (const TokenId id : data.prefix_ids) DT_RETURN_IF_ERROR(CheckId(data, "tokens before a text", id));
  for (const TokenId id : data.suffix_ids) DT_RETURN_IF_ERROR(CheckId(data, "tokens after a text", id));
  for (const CutRule& rule : data.cut_rules) DT_RETURN_IF_ERROR(CheckId(data, "added token", rule.id));
  return absl::OkStatus();
}

absl::Status CheckScores(const TokenizerData& data) {
  if (data.scores.size() != data.tokens.size()) {
    return InvalidArgument("scores: ", data.scores.size(), " entries for ", data.tokens.size(), " tokens");
  }
  for (size_t id = 0; id < data.scores.size(); ++id) {
    if (!std::isfinite(data.scores[id])) return InvalidArgument("scores[", id, "]: not a finite number");
  }
  return absl::OkStatus();
}

// The bytes a token adds to decoded text.
std::string BytesOfToken(const TokenizerData& data, size_t id) {
  const std::string& spelling = data.tokens[id];
  switch (data.types[id]) {
    case TokenType::kUnused: return {};
    case TokenType::kByte: return std::string(1, static_cast<char>(*ParseByteToken(spelling)));
    case TokenType::kControl:
    case TokenType::kUnknown: return spelling;
    case TokenType::kUserDefined: return data.kind == TokenizerKind::kSpmBpe ? ReplaceSpmSpaces(spelling) : spelling;
    case TokenType::kNormal: break;
  }
  if (data.kind == TokenizerKind::kSpmBpe) return ReplaceSpmSpaces(spelling);
  return BytesOfSpelling(spelling).value_or(spelling);
}

// A normal token that no text can lead to: SPM text has no plain space, byte-level text only the 256 stand-ins.
bool Reachable(const TokenizerData& data, size_t id) {
  if (data.types[id] == TokenType::kUserDefined) return true;
  if (data.kind == TokenizerKind::kSpmBpe) return data.tokens[id].find(' ') == std::string::npos;
  return BytesOfSpelling(data.tokens[id]).has_value();
}

// Bytes that occur in no UTF-8 text.
bool NeverInText(int byte) { return byte == 0xC0 || byte == 0xC1 || byte >= 0xF5; }

}  // namespace

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Create(const TokenizerData& data) {
  DT_RETURN_IF_ERROR(CheckTokens(data));
  DT_RETURN_IF_ERROR(CheckIds(data));
  auto tokenizer = std::unique_ptr<Tokenizer>(new Tokenizer());
  tokenizer->kind_ = data.kind;
  tokenizer->ignore_merges_ = data.ignore_merges;
  tokenizer->normalize_nfc_ = data.normalize_nfc;
  tokenizer->fuse_unknown_ = data.fuse_unknown;
  tokenizer->prefix_only_if_missing_ = data.prefix_only_if_missing;
  tokenizer->strip_first_space_ = data.strip_first_space;
  tokenizer->space_prefix_ = data.space_prefix;
  tokenizer->special_ = data.special;
  tokenizer->prefix_ids_ = data.prefix_ids;
  tokenizer->suffix_ids_ = data.suffix_ids;
  if (data.kind == TokenizerKind::kByteLevelBpe) {
    if (data.pre_tokenizer == PreTokenizer::kNone)
      return InvalidArgument("pre-tokenizer: a byte-level tokenizer needs one");
    DT_ASSIGN_OR_RETURN(tokenizer->splitter_, PieceSplitter::Create(data.pre_tokenizer));
  }
  DT_ASSIGN_OR_RETURN(tokenizer->cutter_, SpecialTokenCutter::Create(data));
  DT_RETURN_IF_ERROR(tokenizer->BuildPieces(data));
  DT_RETURN_IF_ERROR(tokenizer->BuildByteTokens(data));
  DT_RETURN_IF_ERROR(tokenizer->BuildMerges(data));
  tokenizer->BuildBound(data);
  return std::unique_ptr<const Tokenizer>(std::move(tokenizer));
}

absl::Status Tokenizer::BuildPieces(const TokenizerData& data) {
  const size_t count = data.tokens.size();
  types_ = data.types;
  offsets_.reserve(count + 1);
  for (size_t id = 0; id < count; ++id) {
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
    bytes_ += BytesOfToken(data, id);
    if (bytes_.size() > (size_t{1} << 31)) return InvalidArgument("tokens: the vocabulary exceeds the limit of 2 GiB");
  }
  offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  bytes_.shrink_to_fit();

  // From here on bytes_ does not move: the indices hold views into it. Normal tokens come first: a user-defined token
  // with the same bytes is found by cutting.
  mergeable_.reserve(count);
  for (const TokenType wanted : {TokenType::kNormal, TokenType::kUserDefined}) {
    for (size_t id = 0; id < count; ++id) {
      if (types_[id] != wanted || !Reachable(data, id)) continue;
      mergeable_.try_emplace(TokenText(static_cast<TokenId>(id)), static_cast<TokenId>(id));
    }
  }
  for (size_t id = 0; id < count; ++id) {
    if (types_[id] == TokenType::kUserDefined || IsSpecial(static_cast<TokenId>(id))) {
      by_spelling_.try_emplace(TokenText(static_cast<TokenId>(id)), static_cast<TokenId>(id));
    }
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::BuildByteTokens(const TokenizerData& data) {
  byte_token_.fill(kNoToken);
  const bool spm = kind_ == TokenizerKind::kSpmBpe;
  for (TokenId id = 0; id < vocab_size(); ++id) {
    const std::string_view text = TokenText(id);
    const TokenType wanted = spm ? TokenType::kByte : TokenType::kNormal;
    if (types_[id] != wanted || text.size() != 1) continue;
    TokenId& slot = byte_token_[static_cast<uint8_t>(text[0])];
    if (slot != kNoToken && !spm) continue;
    if (slot != kNoToken) return InvalidArgument("tokens[", id, "]: the same byte as tokens[", slot, "]");
    slot = id;
  }
  if (special_.unk.has_value()) return absl::OkStatus();
  for (int byte = 0; byte < 256; ++byte) {
    if (byte_token_[byte] == kNoToken && !NeverInText(byte)) {
      return InvalidArgument("tokens: neither a token for byte ", byte,
                             " nor an unknown token; not every text can be encoded");
    }
  }
  return absl::OkStatus();
}

void Tokenizer::BuildBound(const TokenizerData& data) {
  for (const CutRule& rule : data.cut_rules) swallows_space_ |= rule.strip_left || rule.strip_right;
  for (int byte = 0; byte < 256; ++byte)
    if (fuse_unknown_ && byte_token_[byte] == kNoToken && !NeverInText(byte)) return;
  longest_token_bytes_ = 4;  // of a character that is unknown
  for (TokenId id = 0; id < vocab_size(); ++id) {
    if (types_[id] == TokenType::kUnused) continue;
    // What is cut out of text is looked for as spelled, the rest as what it adds.
    const bool cut = types_[id] == TokenType::kUserDefined || IsSpecial(id);
    longest_token_bytes_ = std::max({longest_token_bytes_, TokenText(id).size(), cut ? data.tokens[id].size() : 0});
  }
}

absl::Status Tokenizer::BuildMerges(const TokenizerData& data) {
  if (data.merges.empty() && kind_ == TokenizerKind::kSpmBpe) {
    DT_RETURN_IF_ERROR(CheckScores(data));
    std::vector<uint32_t> ranks;
    ranks.reserve(data.scores.size());
    for (const float score : data.scores) ranks.push_back(MergeRules::RankOfScore(score));
    size_t longest = 0;
    for (const auto& [text, id] : mergeable_) longest = std::max(longest, text.size());
    rules_.UseScores(&mergeable_, std::move(ranks), longest);
    return absl::OkStatus();
  }
  std::unordered_map<std::string_view, TokenId> ids;
  ids.reserve(data.tokens.size());
  for (size_t id = 0; id < data.tokens.size(); ++id) ids.emplace(data.tokens[id], static_cast<TokenId>(id));
  std::string joined;
  if (data.merges.size() > kMaxMerges) return InvalidArgument("merges: more than the limit of ", kMaxMerges);
  for (size_t rank = 0; rank < data.merges.size(); ++rank) {
    const auto [left, right] = data.merges[rank];
    DT_RETURN_IF_ERROR(CheckId(data, "merges", left));
    DT_RETURN_IF_ERROR(CheckId(data, "merges", right));
    joined.assign(data.tokens[left]).append(data.tokens[right]);
    const auto result = ids.find(joined);
    if (result == ids.end()) {
      return InvalidArgument("merges[", rank, "]: its result ", QuoteToken(joined), " is not in the vocabulary");
    }
    // A merge that would make a control token out of ordinary text is not one we follow.
    if (!IsMergeable(types_[result->second])) continue;
    rules_.AddMerge(left, right, {static_cast<uint32_t>(rank), result->second});
  }
  return absl::OkStatus();
}

}  // namespace dovetail::model
