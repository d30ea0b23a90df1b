#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "model/prompt_part.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/pre_tokenizer.h"
#include "model/tokenizer/special_tokens.h"
#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {

inline constexpr size_t kDefaultMaxInputBytes = size_t{4} << 20;  // the HTTP body limit

struct EncodeOptions {
  bool add_special = true;     // put the model's beginning and end tokens around the text (bos, eos)
  bool parse_special = false;  // control tokens spelled out in the text become those tokens
  size_t max_input_bytes = kDefaultMaxInputBytes;
  size_t max_tokens = SIZE_MAX;  // Encode gives up on a text of more
};

// Text to token ids and back.
//
// Encoding: special tokens are cut out first (special_tokens.h), the rest is normalised, split (pre_tokenizer.h) and
// merged (bpe.h). Every valid text encodes; time is O(n log n), memory about 60 bytes per byte of the longest piece.
// Tokens of type control, unknown and unused are never the result of merging. Decoding works on bytes; ill-formed UTF-8
// becomes U+FFFD as DrainUtf8 says.
// Threads: immutable after Create; blocks on nothing.
class Tokenizer {
 public:
  // Checks `data` and builds the tables. kInvalidArgument names the field and the entry: ids out of range, a spelling
  // that comes twice, byte tokens other than <0x00>..<0xFF>, scores that are missing or not finite, merges whose result
  // is no token, no way to spell some byte.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Create(const TokenizerData& data);

  // kInvalidArgument if `text` is not valid UTF-8 (with the offset) or longer than max_input_bytes. kOutOfRange if it
  // is more than max_tokens, as soon as that is known.
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, const EncodeOptions& options = {}) const;

  // Encodes the concatenation of `parts` as one text, so that the ids are those of the rendered prompt; but a control
  // token is recognised only where none of its bytes is input. options.parse_special is not looked at.
  absl::StatusOr<std::vector<TokenId>> EncodeParts(std::span<const PromptPart> parts,
                                                   const EncodeOptions& options = {}) const;

  // A lower bound of the number of tokens that Encode makes of `text`, at a small part of its cost. No token covers
  // more bytes than the longest spelling in the vocabulary, unless normalising shrinks text or white space next to a
  // token vanishes. 0 where there is no bound: runs of unknown characters become one token.
  int64_t LeastTokens(std::string_view text) const;

  // The text of `ids` as the beginning of a sequence. The same as pushing them through an IncrementalDetokenizer.
  std::string Decode(std::span<const TokenId> ids, bool skip_special) const;

  // The bytes that a token adds to the text, not always whole characters; a special token's spelling; empty for unused
  // ids and those outside the vocabulary (a model's embedding may have more rows than there are tokens).
  std::string_view TokenText(TokenId id) const;

  // The token that is spelled `text` (special) or adds exactly these bytes (others).
  std::optional<TokenId> TokenToId(std::string_view text) const;

  // Control and unknown tokens: what skip_special hides.
  bool IsSpecial(TokenId id) const;
  TokenType TypeOf(TokenId id) const;  // kUnused outside the vocabulary

  int vocab_size() const { return static_cast<int>(types_.size()); }
  TokenizerKind kind() const { return kind_; }
  const SpecialIds& special() const { return special_; }
  // What add_special puts before a text; a chat template may have written it already.
  std::span<const TokenId> prefix_ids() const { return prefix_ids_; }
  std::span<const TokenId> suffix_ids() const { return suffix_ids_; }
  bool strip_first_space() const { return strip_first_space_; }

 private:
  struct Scratch;
  Tokenizer() = default;
  absl::Status BuildPieces(const TokenizerData& data);
  absl::Status BuildMerges(const TokenizerData& data);
  absl::Status BuildByteTokens(const TokenizerData& data);
  void BuildBound(const TokenizerData& data);

  absl::StatusOr<std::vector<TokenId>> EncodeSpans(std::string_view text, std::span<const TextSpan> spans,
                                                   const EncodeOptions& options) const;
  absl::Status EncodeText(std::string_view text, bool first, size_t max_tokens, Scratch& scratch,
                          std::vector<TokenId>& ids) const;
  void EncodePiece(std::string_view piece, Scratch& scratch, std::vector<TokenId>& ids) const;
  void EmitUncovered(std::string_view bytes, std::vector<TokenId>& ids) const;
  std::string AsSpm(std::string_view text, bool first) const;

  TokenizerKind kind_ = TokenizerKind::kByteLevelBpe;
  bool ignore_merges_ = false, normalize_nfc_ = false, fuse_unknown_ = false;
  bool prefix_only_if_missing_ = false, strip_first_space_ = false;
  SpacePrefix space_prefix_ = SpacePrefix::kNone;
  size_t longest_token_bytes_ = 0;  // of a text that one token covers; 0: without bound
  bool swallows_space_ = false;     // some token takes the white space around it

  std::string bytes_;              // every token's bytes, one after the other
  std::vector<uint32_t> offsets_;  // vocab_size + 1
  std::vector<TokenType> types_;
  TokenIndex mergeable_;    // bytes -> id of what merging may yield; views into bytes_
  TokenIndex by_spelling_;  // special and user-defined tokens
  std::array<TokenId, 256> byte_token_{};
  SpecialIds special_;
  std::vector<TokenId> prefix_ids_, suffix_ids_;
  MergeRules rules_;
  std::optional<PieceSplitter> splitter_;
  SpecialTokenCutter cutter_;
};

}  // namespace dovetail::model
