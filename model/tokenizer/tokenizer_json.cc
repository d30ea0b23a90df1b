#include "model/tokenizer/tokenizer_json.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "model/tokenizer/tokenizer_json_parse.h"
#include "model/tokenizer/tokenizer_json_steps.h"

namespace dovetail::model {
namespace {

using nlohmann::json;

constexpr char kFile[] = "tokenizer.json";
constexpr char kConfigFile[] = "tokenizer_config.json";

const json& Field(const json& object, const char* name) {
  static const json* const absent = new json(nullptr);
  if (!object.is_object()) return *absent;
  const auto found = object.find(name);
  return found == object.end() ? *absent : *found;
}

bool Flag(const json& object, const char* name) {
  const json& value = Field(object, name);
  return value.is_boolean() && value.get<bool>();
}

absl::Status PutToken(TokenizerData& data, const std::string& spelling, int64_t id, TokenType type) {
  if (id < 0 || id >= static_cast<int64_t>(kMaxVocabularyTokens)) {
    return InvalidArgument("token ", QuoteToken(spelling), ": id ", id, " is not in 0..", kMaxVocabularyTokens - 1);
  }
  const size_t at = static_cast<size_t>(id);
  if (at >= data.tokens.size()) {
    data.tokens.resize(at + 1);
    data.types.resize(at + 1, TokenType::kUnused);  // holes stay unused
  }
  if (!data.tokens[at].empty() && data.tokens[at] != spelling) {
    return InvalidArgument("token id ", id, " is given to both ", QuoteToken(data.tokens[at]), " and ",
                           QuoteToken(spelling));
  }
  data.tokens[at] = spelling;
  data.types[at] = type;
  return absl::OkStatus();
}

absl::Status ReadVocabulary(const ParsedTokenizerJson& parsed, TokenizerData& data) {
  if (parsed.vocabulary.empty()) return InvalidArgument("model.vocab: missing or empty");
  for (const auto& [spelling, id] : parsed.vocabulary) {
    if (spelling.empty()) return InvalidArgument("model.vocab: an empty token with id ", id);
    const bool byte = data.byte_fallback && ParseByteToken(spelling).has_value();
    DT_RETURN_IF_ERROR(PutToken(data, spelling, id, byte ? TokenType::kByte : TokenType::kNormal));
  }
  return absl::OkStatus();
}

absl::Status ReadAddedTokens(const json& document, TokenizerData& data) {
  const json& added = Field(document, "added_tokens");
  if (added.is_null()) return absl::OkStatus();
  if (!added.is_array()) return InvalidArgument("added_tokens: not an array");
  for (size_t i = 0; i < added.size(); ++i) {
    const json& content = Field(added[i], "content");
    const json& id = Field(added[i], "id");
    if (!content.is_string() || content.get_ref<const std::string&>().empty() || !id.is_number_integer()) {
      return InvalidArgument("added_tokens[", i, "]: needs a string \"content\" and an integer \"id\"");
    }
    const TokenType type = Flag(added[i], "special") ? TokenType::kControl : TokenType::kUserDefined;
    const int64_t value = id.get<int64_t>();
    DT_RETURN_IF_ERROR(PutToken(data, content.get<std::string>(), value, type));
    const CutRule rule{static_cast<TokenId>(value), Flag(added[i], "lstrip"), Flag(added[i], "rstrip"),
                       Flag(added[i], "single_word")};
    if (rule.strip_left || rule.strip_right || rule.single_word) data.cut_rules.push_back(rule);
  }
  return absl::OkStatus();
}

std::optional<TokenId> Find(const TokenizerData& data, std::string_view spelling) {
  const auto found = std::find(data.tokens.begin(), data.tokens.end(), spelling);
  if (found == data.tokens.end() || spelling.empty()) return std::nullopt;
  return static_cast<TokenId>(found - data.tokens.begin());
}

absl::Status ReadModel(const json& model, TokenizerData& data) {
  const json& type = Field(model, "type");
  if (!model.is_object()) return InvalidArgument("model: missing");
  if (type.is_string() && type != "BPE") {
    return Unimplemented("model.type: ", QuoteToken(type.get_ref<const std::string&>()), " is not supported, only BPE");
  }
  const json& dropout = Field(model, "dropout");
  if (!dropout.is_null() && dropout != 0.0) return Unimplemented("model.dropout: random merging is not supported");
  for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = Field(model, field);
    if (!value.is_null() && value != "") return Unimplemented("model.", field, ": not supported");
  }
  data.ignore_merges = Flag(model, "ignore_merges");
  data.fuse_unknown = Flag(model, "fuse_unk");
  data.byte_fallback = Flag(model, "byte_fallback");
  return absl::OkStatus();
}

absl::Status ReadUnknownToken(const json& model, TokenizerData& data) {
  const json& unknown = Field(model, "unk_token");
  if (unknown.is_null()) return absl::OkStatus();
  if (!unknown.is_string()) return InvalidArgument("model.unk_token: not a string");
  data.special.unk = Find(data, unknown.get_ref<const std::string&>());
  if (!data.special.unk.has_value()) {
    return InvalidArgument("model.unk_token: ", QuoteToken(unknown.get_ref<const std::string&>()),
                           " is not in the vocabulary");
  }
  data.types[*data.special.unk] = TokenType::kUnknown;
  return absl::OkStatus();
}

// A token named in tokenizer_config.json: "text", {"content": "text"} or null.
absl::Status ReadRole(const json& config, const char* field, TokenizerData& data, std::optional<TokenId>& id) {
  const json& value = Field(config, field);
  const json& spelling = value.is_object() ? Field(value, "content") : value;
  if (spelling.is_null()) return absl::OkStatus();
  if (!spelling.is_string()) return InvalidArgument(field, ": not a string");
  id = Find(data, spelling.get_ref<const std::string&>());
  if (!id.has_value())
    return InvalidArgument(field, ": ", QuoteToken(spelling.get_ref<const std::string&>()),
                           " is not in the vocabulary");
  if (data.types[*id] != TokenType::kUnknown) data.types[*id] = TokenType::kControl;  // a role makes a token special
  return absl::OkStatus();
}

// add_bos_token and add_eos_token, where present, overrule what the post-processor says about that token.
absl::Status ApplyAffixFlag(const json& config, const char* field, const std::optional<TokenId>& id,
                            std::vector<TokenId>& affix) {
  const json& flag = Field(config, field);
  if (!flag.is_boolean()) return absl::OkStatus();
  if (!flag.get<bool>()) {
    if (id.has_value()) std::erase(affix, *id);
    return absl::OkStatus();
  }
  if (!id.has_value()) return InvalidArgument(field, ": true, but the token it means is not named");
  if (std::find(affix.begin(), affix.end(), *id) == affix.end()) affix.insert(affix.begin(), *id);
  return absl::OkStatus();
}

absl::Status ReadConfig(const json& config, TokenizerData& data) {
  DT_RETURN_IF_ERROR(ReadRole(config, "bos_token", data, data.special.bos));
  DT_RETURN_IF_ERROR(ReadRole(config, "eos_token", data, data.special.eos));
  DT_RETURN_IF_ERROR(ReadRole(config, "pad_token", data, data.special.pad));
  DT_RETURN_IF_ERROR(ApplyAffixFlag(config, "add_bos_token", data.special.bos, data.prefix_ids));
  return ApplyAffixFlag(config, "add_eos_token", data.special.eos, data.suffix_ids);
}

absl::StatusOr<TokenizerData> ReadDocument(const ParsedTokenizerJson& parsed) {
  TokenizerData data;
  const json& document = parsed.rest;
  const json& model = Field(document, "model");
  DT_RETURN_IF_ERROR(ReadModel(model, data));
  DT_RETURN_IF_ERROR(ReadVocabulary(parsed, data));
  DT_RETURN_IF_ERROR(ReadAddedTokens(document, data));
  DT_RETURN_IF_ERROR(ReadUnknownToken(model, data));
  DT_ASSIGN_OR_RETURN(data.merges, ResolveMerges(data.tokens, parsed.merges, "model.merges"));
  DT_RETURN_IF_ERROR(
      ReadTextSteps(Field(document, "normalizer"), Field(document, "pre_tokenizer"), Field(document, "decoder"), data));
  DT_RETURN_IF_ERROR(ReadPostProcessor(Field(document, "post_processor"), data));
  if (data.kind == TokenizerKind::kSpmBpe && data.merges.empty())
    return InvalidArgument("model.merges: missing or empty");
  return data;
}

}  // namespace

absl::StatusOr<TokenizerData> TokenizerDataFromJson(std::string_view tokenizer_json,
                                                    std::optional<std::string_view> tokenizer_config_json) {
  for (const std::string_view text : {tokenizer_json, tokenizer_config_json.value_or("")}) {
    if (text.size() > kMaxTokenizerJsonBytes) {
      return InvalidArgument(kFile, ": ", text.size(), " bytes exceed the limit of ", kMaxTokenizerJsonBytes);
    }
  }
  DT_ASSIGN_OR_RETURN(const ParsedTokenizerJson parsed, ParseTokenizerJson(kFile, tokenizer_json));
  absl::StatusOr<TokenizerData> data = ReadDocument(parsed);
  if (!data.ok()) return Annotate(data.status(), kFile);
  if (tokenizer_config_json.has_value()) {
    DT_ASSIGN_OR_RETURN(const json config, ParseConfigJson(kConfigFile, *tokenizer_config_json));
    if (absl::Status status = ReadConfig(config, *data); !status.ok()) return Annotate(status, kConfigFile);
  }
  return data;
}

}  // namespace dovetail::model
