#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "model/tokenizer/pre_tokenizer.h"

namespace dovetail::model {

// What a model file says about its tokenizer: the two readers (tokenizer_json.h, tokenizer_gguf.h) fill it,
// Tokenizer::Create (tokenizer.h) checks it and turns it into something that runs.
// Threads: plain values and pure functions.

inline constexpr size_t kMaxVocabularyTokens = size_t{1} << 20;
inline constexpr size_t kMaxTokenBytes = 4096;        // one token's spelling; real ones stay under 300
inline constexpr size_t kMaxSpecialTokenBytes = 512;  // a token that is looked for in raw text
inline constexpr size_t kMaxMerges = size_t{1} << 22;

enum class TokenizerKind : uint8_t {
  kByteLevelBpe,  // tokens spelled in GPT-2's 256 printable stand-ins for bytes
  kSpmBpe,        // tokens spelled as text with U+2581 for a space; <0xXX> tokens for bytes that no token covers
};

// The values of tokenizer.ggml.token_type.
enum class TokenType : uint8_t {
  kNormal = 1,
  kUnknown = 2,      // stands for text that no token covers; treated as special
  kControl = 3,      // special: cut out of text only where the caller allows it, hidden by skip_special
  kUserDefined = 4,  // cut out of any text before merging; shown
  kUnused = 5,       // never produced by encoding, decodes to nothing
  kByte = 6,         // <0xXX>
};

// Where SPM-style tokenizers put a space in front of text that has none there.
enum class SpacePrefix : uint8_t { kNone, kEveryText, kFirstText };

struct TokenMerge {
  TokenId left = 0;
  TokenId right = 0;
};

// How a special or user-defined token is cut out of text, where that differs from the plain way.
struct CutRule {
  TokenId id = 0;
  bool strip_left = false;   // swallows white space before it
  bool strip_right = false;  // swallows white space after it
  bool single_word = false;  // not next to a letter, digit or underscore
};

struct SpecialIds {
  std::optional<TokenId> bos, eos, unk, pad, eot, eom;
};

struct TokenizerData {
  TokenizerKind kind = TokenizerKind::kByteLevelBpe;
  PreTokenizer pre_tokenizer = PreTokenizer::kNone;

  std::vector<std::string> tokens;  // by id, as spelled in the file; empty only for kUnused
  std::vector<TokenType> types;     // by id
  std::vector<float> scores;        // by id: SPM from GGUF merges the adjacent pair with the best score
  std::vector<TokenMerge> merges;   // best first; used when `scores` is empty
  std::vector<CutRule> cut_rules;

  bool ignore_merges = false;  // a piece that is itself a token is taken whole
  bool normalize_nfc = false;
  bool fuse_unknown = false;  // one unknown token for a run of uncovered characters
  bool byte_fallback = false;

  SpacePrefix space_prefix = SpacePrefix::kNone;
  bool prefix_only_if_missing = false;  // no second space in front of one
  bool strip_first_space = false;       // decoding drops one space at the very start

  std::vector<TokenId> prefix_ids, suffix_ids;  // what add_special puts around a text, usually bos and nothing
  SpecialIds special;
};

// Turns merges spelled as pairs of tokens into ids. kInvalidArgument names the first merge whose parts or result are
// not in `tokens`. `where` names the field in error messages.
absl::StatusOr<std::vector<TokenMerge>> ResolveMerges(const std::vector<std::string>& tokens,
                                                      const std::vector<std::pair<std::string, std::string>>& merges,
                                                      std::string_view where);

// The byte of a token spelled "<0xXX>" with exactly two hexadecimal digits; nullopt for any other spelling.
std::optional<uint8_t> ParseByteToken(std::string_view spelling);

// How SPM-style vocabularies spell a space (U+2581).
inline constexpr std::string_view kSpmSpace = "\xE2\x96\x81";

// `text` with every U+2581 as a plain space.
std::string ReplaceSpmSpaces(std::string_view text);

// A token's spelling shortened and made printable, for error messages.
std::string QuoteToken(std::string_view spelling);

}  // namespace dovetail::model
