#include "proto/rank_memory.h"

#include <cstring>

#include "proto/rank_frames.h"

namespace dovetail::proto {

std::vector<std::byte> EncodeRankMemory(FrameType type, std::string_view name) {
  std::vector<std::byte> payload(sizeof(type) + name.size());
  std::memcpy(payload.data(), &type, sizeof(type));
  std::memcpy(payload.data() + sizeof(type), name.data(), name.size());
  return payload;
}

absl::StatusOr<RankMemoryName> DecodeRankMemory(std::span<const std::byte> payload) {
  RankMemoryName named;
  if (payload.size() <= sizeof(named.type)) return InvalidArgument("a name of memory in ", payload.size(), " bytes");
  std::memcpy(&named.type, payload.data(), sizeof(named.type));
  if (named.type != kRankRows && named.type != kRankHeads && named.type != kRankOutputs)
    return InvalidArgument("memory is named for a frame of type ", static_cast<int>(named.type));
  const std::span<const std::byte> name = payload.subspan(sizeof(named.type));
  named.name = {reinterpret_cast<const char*>(name.data()), name.size()};
  return named;
}

}  // namespace dovetail::proto
