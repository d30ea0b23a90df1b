#pragma once
#include <cstdint>
#include <functional>
#include <queue>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"

namespace dovetail::model {

using TokenIndex = absl::flat_hash_map<std::string_view, TokenId, std::hash<std::string_view>, std::equal_to<>>;

inline constexpr TokenId kNoToken = -1;
inline constexpr uint32_t kNoMerge = 0xFFFFFFFFu;

// What two adjacent symbols become, and how early: lower ranks merge first. rank kNoMerge: they do not merge.
struct MergeResult {
  uint32_t rank = kNoMerge;
  TokenId id = kNoToken;
};

// Says which adjacent symbols merge: by a list of merges (tokenizer.json, GPT-2 style GGUF), or, where the file only
// has scores (SPM-style GGUF), every pair that spells a token, best score first.
// Threads: immutable once filled.
class MergeRules {
 public:
  // A rule of a merge list; a pair that comes twice keeps its first rank.
  void AddMerge(TokenId left, TokenId right, MergeResult result);

  // Scores mode: `index` finds tokens by their bytes and outlives this; `ranks[id]` orders them.
  void UseScores(const TokenIndex* index, std::vector<uint32_t> ranks, size_t longest_token);

  // `joined` are the bytes of both symbols together.
  MergeResult Find(TokenId left, TokenId right, std::string_view joined) const;

  // An unsigned number that is smaller for a higher score; equal for equal scores.
  static uint32_t RankOfScore(float score);

 private:
  absl::flat_hash_map<uint64_t, MergeResult> merges_;
  const TokenIndex* index_ = nullptr;
  std::vector<uint32_t> ranks_;
  size_t longest_token_ = 0;
};

// One symbol of a piece: at first a character or byte, at the end a token. id kNoToken: no token spells it.
struct BpeSymbol {
  uint32_t begin = 0, end = 0;  // bytes of the piece
  TokenId id = kNoToken;
};

// Byte-pair merging of one piece: repeatedly joins the adjacent pair of lowest rank, the leftmost first among equals. A
// heap with lazy deletion: O(n log n) time, about 36 bytes a symbol, no recursion.
// Source: Sennrich et al. 2016; the heap as in SentencePiece (Kudo and Richardson 2018).
// Threads: thread-compatible: it keeps its buffers from piece to piece.
class BpeMerger {
 public:
  explicit BpeMerger(const MergeRules& rules) : rules_(rules) {}

  // Merges `symbols`, which cover `piece` in order without gaps, in place.
  void Merge(std::string_view piece, std::vector<BpeSymbol>& symbols);

 private:
  struct Node {
    int32_t prev = -1, next = -1;
    MergeResult with_next;  // what this symbol and the next one become
    bool alive = true;
  };
  void Rate(std::string_view piece, const std::vector<BpeSymbol>& symbols, int32_t at);

  const MergeRules& rules_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> heap_;  // rank << 32 | symbol
};

}  // namespace dovetail::model
