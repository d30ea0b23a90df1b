#pragma once
#include "proto/codec.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"

// Fields(archive, value) of the structs that several messages hold. Private to proto/.

namespace dovetail::proto {

inline constexpr Position kMaxPosition = Position{kMaxSequenceBlocks} * kSegmentTokens;

// Position fields lie in 0 .. kMaxPosition.
template <typename Archive, typename T>
void PositionField(Archive& archive, const char* name, T& position) {
  archive.Number(name, position);
  if constexpr (Archive::kDecoding)
    archive.Require(position >= 0 && position <= kMaxPosition, name, "is not a position");
}

template <typename Archive, typename T>
void Fields(Archive& a, T& shard) requires std::is_same_v<std::remove_const_t<T>, Shard> {
  a.Id("shard.group", shard.group);
  a.Id("shard.worker", shard.worker);
  a.Id("shard.epoch", shard.epoch);
  a.Number("shard.kv_heads.begin", shard.kv_heads.begin);
  a.Number("shard.kv_heads.end", shard.kv_heads.end);
  a.Number("shard.tokens.begin", shard.tokens.begin);
  a.Number("shard.tokens.end", shard.tokens.end);
  a.Id("shard.generation", shard.generation);
  if constexpr (Archive::kDecoding) {
    a.Require(shard.kv_heads.begin >= 0 && shard.kv_heads.begin < shard.kv_heads.end && shard.kv_heads.end <= kMaxHeads,
              "shard.kv_heads", "is empty or outside the limit");
    a.Require(shard.tokens.begin >= 0 && shard.tokens.begin < shard.tokens.end, "shard.tokens", "is empty");
    a.Require(shard.tokens.begin <= kMaxPosition && (shard.tokens.end == kOpenEnd || shard.tokens.end <= kMaxPosition),
              "shard.tokens", "lies beyond the last position");
    a.Require(shard.tokens.begin % kSegmentTokens == 0 &&
                  (shard.tokens.end == kOpenEnd || shard.tokens.end % kSegmentTokens == 0),
              "shard.tokens", "does not lie on segment boundaries");
  }
}

template <typename Archive, typename Vector>
void ShardsField(Archive& archive, Vector& shards) {
  archive.Each("shards", shards, kMaxShards, [](auto& a, auto& shard) { Fields(a, shard); });
}

}  // namespace dovetail::proto
