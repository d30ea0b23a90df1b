#include "proto/prefix_traffic.h"

#include <algorithm>

namespace dovetail::proto {
namespace {

int64_t SumBelow(int64_t first, int64_t end) { return first >= end ? 0 : (first + end - 1) * (end - first) / 2; }

// The sum of x, not less than `low` and not more than `high`, over x in [first, first + count).
int64_t SumClamped(int64_t first, int64_t count, int64_t low, int64_t high) {
  const int64_t end = first + count;
  const int64_t below = std::clamp(low - first, int64_t{0}, count);
  const int64_t above = std::clamp(end - high, int64_t{0}, count - below);
  return below * low + above * high + SumBelow(first + below, end - above);
}

}  // namespace

TokenRange RowsForLaterRank(const TokenRange& of_rank, Position begin, int window) {
  Position first = of_rank.begin;
  if (window > 0) first = std::max(first, (begin - window + 1) / kSegmentTokens * kSegmentTokens);
  return {std::min(first, of_rank.end), of_rank.end};
}

PrefixTraffic Sum(const PrefixTraffic& traffic, const PrefixTraffic& more) {
  return {traffic.asked_bytes + more.asked_bytes,   traffic.gathered_bytes + more.gathered_bytes,
          traffic.state_bytes + more.state_bytes,   traffic.chain_bytes + more.chain_bytes,
          traffic.direct_bytes + more.direct_bytes, traffic.ring_bytes + more.ring_bytes,
          traffic.switch_bytes + more.switch_bytes, traffic.pass_q_bytes + more.pass_q_bytes};
}

int64_t BytesOf(const PrefixTraffic& traffic) { return PlaneBytesOf(traffic) + RankBytesOf(traffic); }

int64_t PlaneBytesOf(const PrefixTraffic& traffic) {
  return traffic.asked_bytes + traffic.gathered_bytes + traffic.state_bytes;
}

int64_t RankBytesOf(const PrefixTraffic& traffic) {
  return traffic.chain_bytes + traffic.direct_bytes + traffic.ring_bytes + traffic.switch_bytes + traffic.pass_q_bytes;
}

PrefixTraffic TrafficOf(const StepLayout& layout, const SoftmaxSpec& spec) {
  const int64_t element = SizeOf(spec.kv);
  PrefixTraffic traffic;
  traffic.state_bytes = layout.before_bytes;
  for (const ShardStep& item : layout.items) {
    if (item.states != StateExchange::kTokens)
      traffic.state_bytes += item.kv_heads.size() * BytesOf(item.states_left(), spec);
    if (item.attend_end == kOpenEnd) continue;  // not of a prompt that is attended on the compute worker
    traffic.asked_bytes +=
        item.query_heads * (item.rows.q_count * spec.key_dim * element + item.nodes * 4 * (spec.value_dim + 2));
    traffic.gathered_bytes += item.gather_count * item.kv_heads.size() * (spec.key_dim + spec.value_dim) * element;
  }
  return traffic;
}

int64_t SeenTokens(Position ctx_len, int64_t q_len, int window, Position begin, Position end) {
  if (q_len <= 0 || begin >= end) return 0;
  const int64_t up_to = SumClamped(ctx_len + 1, q_len, begin, end);
  const int64_t from = window > 0 ? SumClamped(ctx_len - window + 1, q_len, begin, end) : q_len * begin;
  return up_to - from;
}

double AttentionFlops(int64_t pairs, int query_heads, const SoftmaxSpec& spec) {
  return 2.0 * static_cast<double>(pairs) * query_heads * (spec.key_dim + spec.value_dim);
}

}  // namespace dovetail::proto
