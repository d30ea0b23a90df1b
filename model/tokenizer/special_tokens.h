#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "base/status.h"
#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {

// A stretch of text that may or may not contain control tokens.
struct TextSpan {
  size_t begin = 0, end = 0;  // bytes
  bool control_allowed = false;
};

// What cutting leaves: a token, or ordinary text to be merged.
struct TextFragment {
  TokenId token = -1;         // -1: text[begin, end)
  size_t begin = 0, end = 0;  // bytes
};

// Finds special and user-defined tokens in raw text, leftmost first and longest among those.
// Threads: immutable.
class SpecialTokenCutter {
 public:
  // The tokens of `data` that are cut out of text: control and unknown ones, only where allowed, and user-defined ones,
  // anywhere. kInvalidArgument for one longer than kMaxSpecialTokenBytes.
  static absl::StatusOr<SpecialTokenCutter> Create(const TokenizerData& data);

  // Cuts `text`, whose bytes are covered by `spans` in order without gaps. A control token is found only if every one
  // of its bytes lies where it is allowed. Fragments of text are not empty. Time O(bytes x longest token), in practice
  // O(bytes).
  std::vector<TextFragment> Cut(std::string_view text, std::span<const TextSpan> spans) const;

 private:
  struct Entry {
    TokenId id = -1;
    bool control = false;
    CutRule rule;
  };
  struct Found {
    int32_t entry = -1;
    size_t end = 0;
  };
  int32_t Child(int32_t node, uint8_t byte) const;
  Found LongestAt(std::string_view text, size_t at, size_t control_end) const;

  std::vector<Entry> entries_;
  std::vector<int32_t> entry_of_node_;            // trie nodes; -1: no token ends here
  absl::flat_hash_map<uint64_t, int32_t> child_;  // node << 8 | byte
  bool first_byte_[256] = {};
};

}  // namespace dovetail::model
