#pragma once
#include "proto/codec.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"

// Fields(archive, value) of the structs that several messages hold. Private to proto/.
// Threads: as the archive: one thread at a time.

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

template <typename Archive, typename T>
void PartField(Archive& a, T& part) {
  a.Number("part.ranks", part.ranks);
  if (part.ranks == 0) return;
  a.Id("part.group", part.group);
  PositionField(a, "part.base", part.base);
  PositionField(a, "part.end", part.end);
  a.Number("part.rank", part.rank);
  if constexpr (Archive::kDecoding) {
    a.Require(part.ranks >= 2 && part.ranks <= kMaxPrefillRanks, "part.ranks", "is outside the limit");
    a.Require(part.rank >= 0 && part.rank < part.ranks, "part.rank", "is none of the ranks");
    a.Require(part.base < part.end, "part.end", "is not after part.base");
  }
}

// Of the tokens [begin, end) of a step that is a part of a group.
template <typename Archive>
void RequireTokensOfPart(Archive& a, const PrefillPart& part, StepId step, Position begin, Position end) {
  a.Require(step == StepId() || (part.rank == 0 ? step == part.group : step > part.group), "part.group",
            "is not the step of rank 0");
  a.Require(part.rank == 0 ? begin == part.base : begin > part.base && begin % kSegmentTokens == 0, "part.rank",
            "does not begin where that rank may");
  a.Require(part.rank == part.ranks - 1 ? end == part.end : end < part.end, "part.rank",
            "does not end where that rank may");
}

template <typename Archive, typename Vector>
void ShardsField(Archive& archive, Vector& shards) {
  archive.Each("shards", shards, kMaxShards, [](auto& a, auto& shard) { Fields(a, shard); });
}

}  // namespace dovetail::proto
