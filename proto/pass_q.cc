#include "proto/pass_q.h"

#include <algorithm>

#include "base/segment_tree.h"
#include "proto/prefix_traffic.h"

namespace dovetail::proto {
namespace {

Position CutAt(std::span<const Position> cuts, int rank) { return cuts[static_cast<size_t>(rank)]; }

// Without a window each row sees all of the shard.
int64_t SubtreesOf(const TokenRange& queries, int window, const TokenRange& shard) {
  const int64_t rows = std::max<Position>(0, queries.end - queries.begin);
  if (window == 0 && rows > 0) return rows * CountSubtrees(SegmentsOf({shard.begin, shard.end}));
  int64_t nodes = 0;
  for (Position token = queries.begin; token < queries.end; ++token)
    nodes += CountSubtrees(VisibleSegments(token, window, shard.begin, shard.end));
  return nodes;
}

}  // namespace

std::vector<Position> PassQCuts(const StepPlan& plan) {
  std::vector<Position> cuts;
  for (const RankAddress& rank : plan.ranks) cuts.push_back(rank.begin);
  cuts.push_back(plan.part.end);
  return cuts;
}

TokenRange PassQShard(std::span<const Position> cuts, int rank) {
  const Position begin = CutAt(cuts, rank);
  return {rank == 0 ? begin / kSegmentTokens * kSegmentTokens : begin, CutAt(cuts, rank + 1)};
}

TokenRange PassQQueries(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder) {
  const TokenRange tokens{CutAt(cuts, asker), CutAt(cuts, asker + 1)};
  if (spec.window == 0) return tokens;
  return {tokens.begin, std::clamp(CutAt(cuts, holder + 1) + spec.window - 1, tokens.begin, tokens.end)};
}

int64_t PassQQueryBytes(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder) {
  const TokenRange queries = PassQQueries(spec, cuts, asker, holder);
  return (queries.end - queries.begin) * spec.query_heads * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
}

int64_t PassQPartialBytes(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder) {
  const int64_t nodes = SubtreesOf(PassQQueries(spec, cuts, asker, holder), spec.window, PassQShard(cuts, holder));
  return nodes * spec.query_heads * (spec.value_dim + 2) * static_cast<int64_t>(sizeof(float));
}

int64_t PassQBytesTo(const SoftmaxSpec& spec, std::span<const Position> cuts, int rank) {
  int64_t bytes = 0;
  for (int holder = 0; holder < rank; ++holder) bytes += PassQPartialBytes(spec, cuts, rank, holder);
  for (int asker = rank + 1; asker + 1 < static_cast<int>(cuts.size()); ++asker)
    bytes += PassQQueryBytes(spec, cuts, asker, rank);
  return bytes;
}

double PassQFlopsOf(const SoftmaxSpec& spec, std::span<const Position> cuts, int rank) {
  const TokenRange shard = PassQShard(cuts, rank);
  const Position first = CutAt(cuts, rank);
  const int64_t pairs = SeenTokens(first, cuts.back() - first, spec.window, shard.begin, shard.end);
  return AttentionFlops(pairs, spec.query_heads, spec);
}

}  // namespace dovetail::proto
