#include "model/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace dovetail::model {
namespace {

uint64_t PairKey(TokenId left, TokenId right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void MergeRules::AddMerge(TokenId left, TokenId right, MergeResult result) {
  merges_.try_emplace(PairKey(left, right), result);
}

void MergeRules::UseScores(const TokenIndex* index, std::vector<uint32_t> ranks, size_t longest_token) {
  index_ = index;
  ranks_ = std::move(ranks);
  longest_token_ = longest_token;
}

MergeResult MergeRules::Find(TokenId left, TokenId right, std::string_view joined) const {
  if (index_ != nullptr) {
    if (joined.size() > longest_token_) return {};
    const auto found = index_->find(joined);
    if (found == index_->end()) return {};
    return {ranks_[found->second], found->second};
  }
  if (left == kNoToken || right == kNoToken) return {};
  const auto found = merges_.find(PairKey(left, right));
  return found == merges_.end() ? MergeResult{} : found->second;
}

uint32_t MergeRules::RankOfScore(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score == 0 ? 0.0f : score);  // -0 is 0
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ~ascending;  // a finite score never gives kNoMerge
}

void BpeMerger::Rate(std::string_view piece, const std::vector<BpeSymbol>& symbols, int32_t at) {
  Node& node = nodes_[at];
  node.with_next = {};
  if (node.next < 0) return;
  const BpeSymbol& left = symbols[at];
  const BpeSymbol& right = symbols[node.next];
  node.with_next = rules_.Find(left.id, right.id, piece.substr(left.begin, right.end - left.begin));
}

void BpeMerger::Merge(std::string_view piece, std::vector<BpeSymbol>& symbols) {
  const int32_t count = static_cast<int32_t>(symbols.size());
  if (count < 2) return;
  nodes_.assign(count, Node{});
  heap_.clear();
  const auto entry = [this](int32_t at) {
    return static_cast<uint64_t>(nodes_[at].with_next.rank) << 32 | static_cast<uint32_t>(at);
  };
  const auto push = [&](int32_t at) {
    Rate(piece, symbols, at);
    if (nodes_[at].with_next.id == kNoToken) return;
    heap_.push_back(entry(at));
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  };
  for (int32_t at = 0; at < count; ++at) {
    nodes_[at].prev = at - 1;
    nodes_[at].next = at + 1 < count ? at + 1 : -1;
    Rate(piece, symbols, at);
    if (nodes_[at].with_next.id != kNoToken) heap_.push_back(entry(at));
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());

  while (!heap_.empty()) {
    const uint64_t top = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
    const int32_t at = static_cast<int32_t>(top & 0xFFFFFFFFu);
    Node& node = nodes_[at];
    // An entry is stale when its symbol is gone or now has a pair of another rank; of the same rank it is that pair's
    // turn.
    if (!node.alive || node.with_next.id == kNoToken || node.with_next.rank != top >> 32) continue;
    const int32_t eaten = node.next;
    symbols[at].end = symbols[eaten].end;
    symbols[at].id = node.with_next.id;
    nodes_[eaten].alive = false;
    node.next = nodes_[eaten].next;
    if (node.next >= 0) nodes_[node.next].prev = at;
    push(at);
    if (node.prev >= 0) push(node.prev);
  }

  size_t kept = 0;
  for (int32_t at = 0; at >= 0; at = nodes_[at].next) symbols[kept++] = symbols[at];
  symbols.resize(kept);
}

}  // namespace dovetail::model
