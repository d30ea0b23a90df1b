#include "model/tokenizer/tokenizer_gguf.h"

#include <utility>

namespace dovetail::model {
namespace {

absl::Status CopyTokens(const GgufTokenizerFields& fields, TokenizerData& data) {
  const size_t count = fields.tokens.size();
  if (count == 0) return InvalidArgument("tokenizer.ggml.tokens: missing or empty");
  if (count > kMaxVocabularyTokens) {
    return InvalidArgument("tokenizer.ggml.tokens: ", count, " tokens exceed the limit of ", kMaxVocabularyTokens);
  }
  if (fields.token_type.size() != count) {
    return InvalidArgument("tokenizer.ggml.token_type: ", fields.token_type.size(), " entries for ", count, " tokens");
  }
  data.tokens.reserve(count);
  data.types.reserve(count);
  for (size_t id = 0; id < count; ++id) {
    if (fields.tokens[id].size() > kMaxTokenBytes) {
      return InvalidArgument("tokenizer.ggml.tokens[", id, "]: ", fields.tokens[id].size(),
                             " bytes exceed the limit of ", kMaxTokenBytes);
    }
    const int64_t type = fields.token_type[id];
    if (type < 1 || type > 6)
      return InvalidArgument("tokenizer.ggml.token_type[", id, "]: ", type, " is not one of 1..6");
    data.tokens.emplace_back(fields.tokens[id]);
    // Converters fill holes in the vocabulary with empty tokens.
    data.types.push_back(fields.tokens[id].empty() ? TokenType::kUnused : static_cast<TokenType>(type));
  }
  return absl::OkStatus();
}

absl::Status CopyId(std::string_view key, const std::optional<int64_t>& id, size_t count, std::optional<TokenId>& out) {
  if (!id.has_value()) return absl::OkStatus();
  // Some converters write 0xFFFFFFFF or -1 for "none".
  if (*id == -1 || *id == 0xFFFFFFFFll) return absl::OkStatus();
  if (*id < 0 || static_cast<uint64_t>(*id) >= count) {
    return InvalidArgument("tokenizer.ggml.", std::string(key), ": ", *id, " is outside the vocabulary of ", count,
                           " tokens");
  }
  out = static_cast<TokenId>(*id);
  return absl::OkStatus();
}

absl::Status CopySpecialIds(const GgufTokenizerFields& fields, TokenizerData& data) {
  const size_t count = data.tokens.size();
  DT_RETURN_IF_ERROR(CopyId("bos_token_id", fields.bos_token_id, count, data.special.bos));
  DT_RETURN_IF_ERROR(CopyId("eos_token_id", fields.eos_token_id, count, data.special.eos));
  DT_RETURN_IF_ERROR(CopyId("unknown_token_id", fields.unknown_token_id, count, data.special.unk));
  DT_RETURN_IF_ERROR(CopyId("padding_token_id", fields.padding_token_id, count, data.special.pad));
  DT_RETURN_IF_ERROR(CopyId("eot_token_id", fields.eot_token_id, count, data.special.eot));
  DT_RETURN_IF_ERROR(CopyId("eom_token_id", fields.eom_token_id, count, data.special.eom));
  // Conversions exist that call <|im_end|> and its like normal or user-defined: text must not end a turn all the same.
  for (const std::optional<TokenId>& id : {data.special.bos, data.special.eos, data.special.eot, data.special.eom}) {
    if (!id.has_value()) continue;
    const std::string& spelling = data.tokens[*id];
    TokenType& type = data.types[*id];
    const bool plain = type == TokenType::kNormal || type == TokenType::kUserDefined;
    if (plain && spelling.size() > 2 && spelling.front() == '<' && spelling.back() == '>') type = TokenType::kControl;
  }
  return absl::OkStatus();
}

absl::Status SetAffixes(const GgufTokenizerFields& fields, bool add_bos, TokenizerData& data) {
  if (fields.add_bos_token.value_or(add_bos)) {
    if (!data.special.bos.has_value())
      return InvalidArgument("tokenizer.ggml.bos_token_id: missing, but texts begin with it");
    data.prefix_ids.push_back(*data.special.bos);
  }
  if (fields.add_eos_token.value_or(false)) {
    if (!data.special.eos.has_value())
      return InvalidArgument("tokenizer.ggml.eos_token_id: missing, but texts end with it");
    data.suffix_ids.push_back(*data.special.eos);
  }
  return absl::OkStatus();
}

// "left right": neither part has a plain space, for byte-level spelling has none.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> SplitMerges(
    const std::vector<std::string_view>& merges) {
  std::vector<std::pair<std::string, std::string>> pairs;
  if (merges.size() > kMaxMerges) {
    return InvalidArgument("tokenizer.ggml.merges: ", merges.size(), " merges exceed the limit of ", kMaxMerges);
  }
  pairs.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const size_t space = merges[rank].find(' ', 1);
    if (space == std::string_view::npos || space + 1 == merges[rank].size()) {
      return InvalidArgument("tokenizer.ggml.merges[", rank, "]: ", QuoteToken(merges[rank]),
                             " is not two tokens and a space");
    }
    pairs.emplace_back(merges[rank].substr(0, space), merges[rank].substr(space + 1));
  }
  return pairs;
}

absl::Status FillByteLevel(const GgufTokenizerFields& fields, TokenizerData& data) {
  data.kind = TokenizerKind::kByteLevelBpe;
  if (!fields.pre.has_value()) {
    return InvalidArgument(
        "tokenizer.ggml.pre: missing, so it is unknown how this model splits text; convert the model "
        "again with a newer converter, or use its Hugging Face folder");
  }
  DT_ASSIGN_OR_RETURN(const GgufPre pre, PreTokenizerOfGguf(*fields.pre));
  data.pre_tokenizer = pre.pre;
  data.ignore_merges = pre.ignore_merges;
  data.normalize_nfc = pre.normalize_nfc;
  if (fields.merges.empty()) return InvalidArgument("tokenizer.ggml.merges: missing or empty");
  DT_ASSIGN_OR_RETURN(const auto merges, SplitMerges(fields.merges));
  DT_ASSIGN_OR_RETURN(data.merges, ResolveMerges(data.tokens, merges, "tokenizer.ggml.merges"));
  return SetAffixes(fields, pre.add_bos, data);
}

absl::Status FillSpm(const GgufTokenizerFields& fields, TokenizerData& data) {
  data.kind = TokenizerKind::kSpmBpe;
  if (fields.scores.size() != data.tokens.size()) {
    return InvalidArgument("tokenizer.ggml.scores: ", fields.scores.size(), " entries for ", data.tokens.size(),
                           " tokens");
  }
  data.scores = fields.scores;
  data.byte_fallback = true;
  const bool prefix = fields.add_space_prefix.value_or(true);
  data.space_prefix = prefix ? SpacePrefix::kEveryText : SpacePrefix::kNone;
  data.strip_first_space = prefix;
  return SetAffixes(fields, /*add_bos=*/true, data);
}

}  // namespace

absl::StatusOr<TokenizerData> TokenizerDataFromGguf(const GgufTokenizerFields& fields) {
  TokenizerData data;
  DT_RETURN_IF_ERROR(CopyTokens(fields, data));
  DT_RETURN_IF_ERROR(CopySpecialIds(fields, data));
  if (fields.model == "gpt2") {
    DT_RETURN_IF_ERROR(FillByteLevel(fields, data));
  } else if (fields.model == "llama") {
    DT_RETURN_IF_ERROR(FillSpm(fields, data));
  } else {
    return Unimplemented("tokenizer.ggml.model: ", QuoteToken(fields.model),
                         " is not a tokenizer we know (gpt2, llama)");
  }
  return data;
}

}  // namespace dovetail::model
