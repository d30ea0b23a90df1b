#include "sequence_parallel/exchange_options.h"

#include <algorithm>
#include <set>

#include "proto/token_layout.h"

namespace dovetail::sequence_parallel {

absl::Status ExchangeOptions::Validate() const {
  const int count = static_cast<int>(std::min<size_t>(members.size(), proto::kMaxLayoutRanks + 1));
  if (count < 1 || count > proto::kMaxLayoutRanks)
    return InvalidArgument("exchange: ", members.size(), " members; between 1 and ", proto::kMaxLayoutRanks);
  if (rank < 0 || rank >= count) return InvalidArgument("exchange: rank ", rank, " is outside 0..", count - 1);
  std::set<NodeId> nodes;
  for (const NodeId node : members)
    if (!nodes.insert(node).second) return InvalidArgument("exchange: node ", node.value(), " is a member twice");
  if (chunk_bytes < kMinChunkBytes || chunk_bytes > kMaxChunkBytes)
    return InvalidArgument("exchange: chunk_bytes ", chunk_bytes, " is outside ", kMinChunkBytes, "..", kMaxChunkBytes);
  if (chunks_in_flight < 1 || chunks_in_flight > kMaxChunksInFlight)
    return InvalidArgument("exchange: chunks_in_flight ", chunks_in_flight, " is outside 1..", kMaxChunksInFlight);
  const int64_t least = int64_t{count} * chunks_in_flight * kMinChunkBytes;
  if (max_staging_bytes < least)
    return InvalidArgument("exchange: max_staging_bytes ", max_staging_bytes, " is below ", least, ", which ", count,
                           " ranks with ", chunks_in_flight, " chunks in flight need");
  if (stall <= absl::ZeroDuration()) return InvalidArgument("exchange: stall ", absl::FormatDuration(stall));
  return absl::OkStatus();
}

int64_t ExchangeOptions::ChunkBytesFor(int peers) const {
  const int64_t share = max_staging_bytes / (int64_t{std::max(peers, 1)} * chunks_in_flight);
  return std::min(chunk_bytes, share / 64 * 64);
}

std::string SwitchId::DebugString() const { return absl::StrCat("switch ", index, " of step ", step.value()); }

}  // namespace dovetail::sequence_parallel
