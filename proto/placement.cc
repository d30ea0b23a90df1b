#include "proto/placement.h"

#include <algorithm>
#include <vector>

namespace dovetail::proto {
namespace {

absl::Status ValidateShard(const Shard& shard, const AttentionTable& table) {
  if (shard.group.value() >= table.groups.size())
    return InvalidArgument(DebugString(shard), ": the model has ", table.groups.size(), " layer groups");
  const int heads = table.softmax(shard.group).kv_heads;
  if (shard.kv_heads.begin < 0 || shard.kv_heads.end > heads || shard.kv_heads.size() < 1)
    return InvalidArgument(DebugString(shard), ": KV heads must lie in 0..", heads);
  const TokenRange& tokens = shard.tokens;
  if (tokens.begin < 0 || tokens.begin >= tokens.end || tokens.begin % kSegmentTokens != 0 ||
      (tokens.end != kOpenEnd && tokens.end % kSegmentTokens != 0))
    return InvalidArgument(DebugString(shard), ": token ranges begin and end on multiples of ", kSegmentTokens);
  if (table.linear(shard.group) != nullptr && !tokens.whole())
    return InvalidArgument(DebugString(shard), ": a linear state lies whole on one worker; shard its heads instead");
  if (tokens.begin > kMaxPositions || (tokens.end != kOpenEnd && tokens.end > kMaxPositions))
    return InvalidArgument(DebugString(shard), ": tokens lie in 0..", kMaxPositions);
  return absl::OkStatus();
}

// The shards that hold one head of one group must tile its positions.
absl::Status ValidateHead(const Placement& placement, LayerGroup group, int head) {
  std::vector<const Shard*> shards;
  for (const Shard& shard : placement)
    if (shard.group == group && shard.kv_heads.begin <= head && head < shard.kv_heads.end) shards.push_back(&shard);
  std::sort(shards.begin(), shards.end(),
            [](const Shard* a, const Shard* b) { return a->tokens.begin < b->tokens.begin; });
  Position covered = 0;
  for (const Shard* shard : shards) {
    if (shard->tokens.begin != covered)
      return InvalidArgument("placement: group ", group.value(), " KV head ", head, ": positions from ",
                             std::min(covered, shard->tokens.begin), " are ",
                             shard->tokens.begin > covered ? "placed nowhere" : "placed twice");
    covered = shard->tokens.end;
  }
  if (covered != kOpenEnd)
    return InvalidArgument("placement: group ", group.value(), " KV head ", head, ": positions from ", covered,
                           " are placed nowhere");
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const Placement& placement, const AttentionTable& table) {
  if (placement.size() > kMaxShards)
    return InvalidArgument("placement: ", placement.size(), " shards; at most ", kMaxShards);
  for (const Shard& shard : placement) DT_RETURN_IF_ERROR(ValidateShard(shard, table));
  for (const Shard& a : placement)
    for (const Shard& b : placement)
      if (a.group == b.group && a.kv_heads.begin < b.kv_heads.end && b.kv_heads.begin < a.kv_heads.end &&
          !(a.kv_heads == b.kv_heads))
        return InvalidArgument(DebugString(a), " and ", DebugString(b), ": head ranges must be equal or disjoint");
  for (int group = 0; group < table.group_count(); ++group)
    for (int head = 0; head < table.softmax(LayerGroup(group)).kv_heads; ++head)
      DT_RETURN_IF_ERROR(ValidateHead(placement, LayerGroup(group), head));
  return absl::OkStatus();
}

KvGeneration GenerationAt(const Placement& placement, WorkerId worker) {
  for (const Shard& shard : placement)
    if (shard.worker == worker) return shard.generation;
  return KvGeneration(0);
}

void SetGeneration(Placement& placement, WorkerId worker, KvGeneration generation) {
  for (Shard& shard : placement)
    if (shard.worker == worker) shard.generation = generation;
}

Placement WholePlacement(const AttentionTable& table, WorkerId worker, Epoch epoch) {
  Placement placement;
  for (int group = 0; group < table.group_count(); ++group) {
    const LayerGroup id(static_cast<uint16_t>(group));
    placement.push_back(Shard{id, worker, epoch, HeadRange{0, table.softmax(id).kv_heads}, TokenRange{}});
  }
  return placement;
}

ShardRows RowsOf(const TokenRange& tokens, int window, Position ctx_len, int q_len, Position attend_end) {
  const Position end = ctx_len + q_len;
  ShardRows rows;
  rows.kv_first = static_cast<int>(std::clamp<Position>(tokens.begin - ctx_len, 0, q_len));
  rows.kv_count = static_cast<int>(std::clamp<Position>(tokens.end, ctx_len, end) - ctx_len) - rows.kv_first;
  rows.kv_count = std::max(rows.kv_count, 0);
  // The first new token sees the furthest back; if the shard ends before even that, no query sees it.
  const Position last = std::min(tokens.end, attend_end);
  const bool out_of_window = window > 0 && last != kOpenEnd && last + window <= ctx_len + 1;
  if (tokens.begin < std::min(end, attend_end) && !out_of_window) {
    rows.q_first = static_cast<int>(std::max<Position>(tokens.begin - ctx_len, 0));
    rows.q_count = q_len - rows.q_first;
  }
  return rows;
}

std::string DebugString(const Shard& shard) {
  return absl::StrCat("shard of group ", shard.group.value(), " on worker ", shard.worker.value(), ", KV heads ",
                      shard.kv_heads.begin, "..", shard.kv_heads.end, ", tokens ", shard.tokens.begin, "..",
                      shard.tokens.end == kOpenEnd ? "" : absl::StrCat(shard.tokens.end));
}

}  // namespace dovetail::proto
