#include "model/tokenizer/tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/normalize.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

absl::Status CheckCount(const std::vector<TokenId>& ids, size_t max_tokens) {
  if (ids.size() <= max_tokens) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("the text is more than ", max_tokens, " tokens"));
}

}  // namespace

// Buffers of one Encode call, reused from piece to piece.
struct Tokenizer::Scratch {
  explicit Scratch(const MergeRules& rules) : merger(rules) {}
  BpeMerger merger;
  std::vector<std::string_view> pieces;
  std::vector<BpeSymbol> symbols;
};

absl::StatusOr<std::vector<TokenId>> Tokenizer::Encode(std::string_view text, const EncodeOptions& options) const {
  const TextSpan whole{0, text.size(), options.parse_special};
  return EncodeSpans(text, {&whole, 1}, options);
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeParts(std::span<const PromptPart> parts,
                                                            const EncodeOptions& options) const {
  std::string text;
  std::vector<TextSpan> spans;
  for (const PromptPart& part : parts) {
    if (part.text.empty()) continue;
    if (part.text.size() > options.max_input_bytes - std::min(options.max_input_bytes, text.size())) {
      return InvalidArgument("the prompt exceeds the limit of ", options.max_input_bytes, " bytes; shorten it");
    }
    spans.push_back({text.size(), text.size() + part.text.size(), !part.is_input});
    text.append(part.text);
  }
  return EncodeSpans(text, spans, options);
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeSpans(std::string_view text, std::span<const TextSpan> spans,
                                                            const EncodeOptions& options) const {
  constexpr size_t kMostBytes = size_t{256} << 20;  // symbols are counted in 32 bits
  const size_t limit = std::min(options.max_input_bytes, kMostBytes);
  if (text.size() > limit) {
    return InvalidArgument("the text has ", text.size(), " bytes, which exceeds the limit of ", limit, "; shorten it");
  }
  if (const size_t valid = ValidUtf8Prefix(text); valid < text.size()) {
    return InvalidArgument("the text is not valid UTF-8 at byte ", valid);
  }
  std::vector<TokenId> ids;
  if (options.add_special) ids = prefix_ids_;
  Scratch scratch(rules_);
  for (const TextFragment& fragment : cutter_.Cut(text, spans)) {
    if (fragment.token >= 0) {
      ids.push_back(fragment.token);
      continue;
    }
    const std::string_view part = text.substr(fragment.begin, fragment.end - fragment.begin);
    DT_RETURN_IF_ERROR(EncodeText(part, fragment.begin == 0, options.max_tokens, scratch, ids));
  }
  if (options.add_special) ids.insert(ids.end(), suffix_ids_.begin(), suffix_ids_.end());
  DT_RETURN_IF_ERROR(CheckCount(ids, options.max_tokens));
  return ids;
}

absl::Status Tokenizer::EncodeText(std::string_view text, bool first, size_t max_tokens, Scratch& scratch,
                                   std::vector<TokenId>& ids) const {
  std::string changed;
  if (normalize_nfc_) {
    DT_ASSIGN_OR_RETURN(changed, NormalizeNfc(text));
    text = changed;
  }
  if (kind_ == TokenizerKind::kSpmBpe) {
    changed = AsSpm(text, first);
    EncodePiece(changed, scratch, ids);
    return absl::OkStatus();
  }
  DT_RETURN_IF_ERROR(splitter_->Split(text, scratch.pieces));
  for (const std::string_view piece : scratch.pieces) {
    EncodePiece(piece, scratch, ids);
    DT_RETURN_IF_ERROR(CheckCount(ids, max_tokens));
  }
  return absl::OkStatus();
}

int64_t Tokenizer::LeastTokens(std::string_view text) const {
  if (longest_token_bytes_ == 0) return 0;
  size_t bytes = text.size();
  if (swallows_space_) {
    for (size_t at = 0; at < text.size();) {
      const Utf8Step step = NextUtf8(text.substr(at));
      if (step.kind == Utf8Kind::kValid && IsWhiteSpace(step.code_point)) bytes -= step.length;
      at += step.length;
    }
  }
  size_t shrinks = kind_ == TokenizerKind::kSpmBpe ? kSpmSpace.size() : 1;  // U+2581 becomes a space
  if (normalize_nfc_ && !SurelyNfc(text)) shrinks = kMostNfcShrinks;
  const size_t most = longest_token_bytes_ * shrinks;
  return static_cast<int64_t>((bytes + most - 1) / most);
}

// Tokens hold spaces where the file spells U+2581, so text is brought to the same form: the two are one to an SPM
// tokenizer.
std::string Tokenizer::AsSpm(std::string_view text, bool first) const {
  const bool wanted = space_prefix_ == SpacePrefix::kEveryText || (space_prefix_ == SpacePrefix::kFirstText && first);
  std::string spm;
  spm.reserve(text.size() + 1);
  spm = ReplaceSpmSpaces(text);
  if (wanted && !(prefix_only_if_missing_ && spm.starts_with(' '))) spm.insert(spm.begin(), ' ');
  return spm;
}

void Tokenizer::EncodePiece(std::string_view piece, Scratch& scratch, std::vector<TokenId>& ids) const {
  if (ignore_merges_) {
    if (const auto whole = mergeable_.find(piece); whole != mergeable_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  std::vector<BpeSymbol>& symbols = scratch.symbols;
  symbols.clear();
  for (uint32_t at = 0; at < piece.size();) {
    uint32_t length = 1;
    TokenId id = kNoToken;
    if (kind_ == TokenizerKind::kByteLevelBpe) {
      id = byte_token_[static_cast<uint8_t>(piece[at])];
    } else {
      length = NextUtf8(piece.substr(at)).length;
      const auto found = mergeable_.find(piece.substr(at, length));
      if (found != mergeable_.end()) id = found->second;
    }
    symbols.push_back({at, at + length, id});
    at += length;
  }
  scratch.merger.Merge(piece, symbols);
  for (const BpeSymbol& symbol : symbols) {
    if (symbol.id != kNoToken) {
      ids.push_back(symbol.id);
    } else {
      EmitUncovered(piece.substr(symbol.begin, symbol.end - symbol.begin), ids);
    }
  }
}

void Tokenizer::EmitUncovered(std::string_view bytes, std::vector<TokenId>& ids) const {
  if (kind_ == TokenizerKind::kSpmBpe) {
    if (bytes == " ") bytes = kSpmSpace;
    const bool covered = std::all_of(bytes.begin(), bytes.end(),
                                     [this](char b) { return byte_token_[static_cast<uint8_t>(b)] != kNoToken; });
    if (covered) {
      for (const char byte : bytes) ids.push_back(byte_token_[static_cast<uint8_t>(byte)]);
      return;
    }
  }
  DT_CHECK(special_.unk.has_value(), "Create lets no vocabulary pass that cannot spell every text");
  if (fuse_unknown_ && !ids.empty() && ids.back() == *special_.unk) return;
  ids.push_back(*special_.unk);
}

std::string Tokenizer::Decode(std::span<const TokenId> ids, bool skip_special) const {
  IncrementalDetokenizer detokenizer(*this, {.skip_special_tokens = skip_special, .at_sequence_start = true});
  std::string text;
  for (const TokenId id : ids) text += detokenizer.Push(id);
  return text + detokenizer.Flush();
}

std::string_view Tokenizer::TokenText(TokenId id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
}

std::optional<TokenId> Tokenizer::TokenToId(std::string_view text) const {
  for (const TokenIndex* index : {&by_spelling_, &mergeable_}) {
    if (const auto found = index->find(text); found != index->end()) return found->second;
  }
  return std::nullopt;
}

TokenType Tokenizer::TypeOf(TokenId id) const { return id < 0 || id >= vocab_size() ? TokenType::kUnused : types_[id]; }

bool Tokenizer::IsSpecial(TokenId id) const {
  const TokenType type = TypeOf(id);
  return type == TokenType::kControl || type == TokenType::kUnknown;
}

}  // namespace dovetail::model
