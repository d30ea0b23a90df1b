#include "proto/head_switch.h"

#include <algorithm>

#include "base/segment_tree.h"
#include "proto/prefix_traffic.h"

namespace dovetail::proto {

HeadRange HeadsOfRank(int kv_heads, int rank, int ranks) {
  return {rank * kv_heads / ranks, (rank + 1) * kv_heads / ranks};
}

int MostSwitchRanks(const AttentionTable& table) {
  int most = kMaxHeads + 1;
  for (const SoftmaxSpec& spec : table.views)
    if (!spec.linear()) most = std::min(most, spec.kv_heads);
  return most > kMaxHeads ? 0 : most;
}

TokenRange TokensOfRank(const StepPlan& plan, int rank) {
  const auto r = static_cast<size_t>(rank);
  return {plan.ranks[r].begin, rank + 1 == plan.part.ranks ? plan.part.end : plan.ranks[r + 1].begin};
}

int64_t HeadRowsBytes(const SoftmaxSpec& spec, const TokenRange& tokens, Position first, int kv_heads) {
  const int64_t queries = (tokens.end - tokens.begin) * spec.group_size() * spec.key_dim;
  const int64_t keys_values = (tokens.end - first) * (spec.key_dim + spec.value_dim);
  return (queries + keys_values) * kv_heads * static_cast<int64_t>(SizeOf(spec.kv));
}

// Without a window, those of a segment see the same segments.
int64_t SubtreesOf(const TokenRange& tokens, int window, Position begin) {
  int64_t nodes = 0;
  for (Position token = tokens.begin; token < tokens.end;) {
    const Position next = window > 0 ? token + 1 : std::min(tokens.end, (token / kSegmentTokens + 1) * kSegmentTokens);
    nodes += (next - token) * CountSubtrees(VisibleSegments(token, window, begin, tokens.end));
    token = next;
  }
  return nodes;
}

int64_t HeadOutputBytes(const SoftmaxSpec& spec, const TokenRange& tokens, Position begin, int kv_heads,
                        HeadPartials partials) {
  const int64_t heads = int64_t{kv_heads} * spec.group_size(), count = tokens.end - tokens.begin;
  if (begin > 0) {
    const int64_t nodes = partials == HeadPartials::kOfTokens ? count : SubtreesOf(tokens, spec.window, begin);
    return nodes * heads * (spec.value_dim + 2) * int64_t{sizeof(float)};
  }
  return count * heads * spec.value_dim * static_cast<int64_t>(SizeOf(spec.kv));
}

int64_t SwitchBytesTo(const SoftmaxSpec& spec, const SwitchRank& rank) {
  const int own = HeadsOfRank(spec.kv_heads, rank.rank, rank.ranks).size();
  const Position begin = SwitchBegin(rank.base);
  return HeadRowsBytes(spec, {rank.base, rank.tokens.begin}, rank.rank == 0 ? rank.base : begin, own) +
         HeadRowsBytes(spec, {rank.tokens.end, rank.end}, rank.tokens.end, own) +
         HeadOutputBytes(spec, rank.tokens, begin, spec.kv_heads - own, rank.partials);
}

double SwitchFlopsOf(const SoftmaxSpec& spec, const SwitchRank& rank) {
  const int64_t pairs = SeenTokens(rank.base, rank.end - rank.base, spec.window, SwitchBegin(rank.base), rank.end);
  return AttentionFlops(pairs, HeadsOfRank(spec.kv_heads, rank.rank, rank.ranks).size() * spec.group_size(), spec);
}

}  // namespace dovetail::proto
